"""`jaxrl`: the commands and the one place where errors become messages and exit codes."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxrl_llm import config as config_room
from jaxrl_llm.types import RunFailedError, UserError

USER_ERROR, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
data_app = typer.Typer(no_args_is_help=True, help="Look at data.")
app.add_typer(data_app, name="data")


def _keys() -> str:
    rows = [f"  {name} ({kind}, default {default}): {text}" for name, kind, default, text in config_room.describe()]
    return "\b\nConfiguration keys, for KEY=VALUE and for YAML files:\n" + "\n".join(rows)


ConfigPath = Annotated[Path, typer.Argument(help="a YAML file, for example configs/quickstart.yaml", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="dotted overrides, for example optimizer.lr=1e-6", metavar="[KEY=VALUE]..."),
]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="where everything goes [default: runs/<name of CONFIG>]")
]
Run = Annotated[Path, typer.Argument(help="a run directory", metavar="RUN")]


@app.command(epilog=_keys())
def train(config: ConfigPath, overrides: Overrides = None, run_dir: RunDir = None) -> None:
    """Train with RL (after the supervised warm-up, if the config has one), evaluate, forecast and report.

    The same command goes on where an interrupted run stopped.
    """
    from jaxrl_llm.cli.training import run_training

    outcome = run_training(
        config_room.load(config, overrides or ()), run_dir or Path("runs") / config.stem, reinforce=True
    )
    if outcome == "interrupted":
        raise typer.Exit(INTERRUPTED)


@app.command(epilog=_keys())
def sft(config: ConfigPath, overrides: Overrides = None, run_dir: RunDir = None) -> None:
    """Only the supervised warm-up: a checkpoint at step 0, from which `jaxrl train` goes on."""
    from jaxrl_llm.cli.training import run_training

    outcome = run_training(
        config_room.load(config, overrides or ()), run_dir or Path("runs") / config.stem, reinforce=False
    )
    if outcome == "interrupted":
        raise typer.Exit(INTERRUPTED)


Target = Annotated[
    Path, typer.Argument(help="a YAML file, a run directory, or a checkpoint directory of one", metavar="CONFIG_OR_RUN")
]
Weights = Annotated[
    Path | None, typer.Option("--run-dir", help="the run whose newest checkpoint to use, or one checkpoint of it")
]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="untrained weights, to try things out")]
Averaged = Annotated[bool, typer.Option("--ema", help="the averaged weights of a run with train.ema")]


@app.command()
def serve(
    target: Target,
    overrides: Overrides = None,
    run_dir: Weights = None,
    random_weights: RandomWeights = False,
    host: Annotated[str, typer.Option(help="any but this machine's own needs a token and TLS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="of gRPC; 0 takes a free one", min=0, max=65535)] = 9000,
    http_port: Annotated[int, typer.Option(help="of HTTP; 0 takes a free one", min=0, max=65535)] = 8000,
    token_file: Annotated[Path | None, typer.Option(help="file of the token [default: $JAXRL_SERVE_TOKEN]")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key of the certificate")] = None,
    name: Annotated[str | None, typer.Option(help="the model's name for HTTP clients [default: CONFIG's]")] = None,
    max_queue: Annotated[int, typer.Option(help="completions that may wait for a slot", min=1)] = 1024,
    max_calls: Annotated[int, typer.Option(help="open calls of each server", min=1)] = 256,
    ema: Averaged = False,
    top_logprobs: Annotated[
        int, typer.Option(help="most alternatives a request may ask for; 0: none, and no prompt is scored", min=0)
    ] = 20,
) -> None:
    """Serve a policy over gRPC (JetStream's service and the RL service) and OpenAI-compatible HTTP."""
    from jaxrl_llm.sampler.serving.access import check_access, read_token

    access = check_access(host, read_token(token_file), tls_cert, tls_key)
    from jaxrl_llm.cli.console import say
    from jaxrl_llm.cli.policy import open_policy
    from jaxrl_llm.cli.serving import ServeOptions, serve_policy

    policy = open_policy(
        target, overrides or (), run_dir, random_weights=random_weights, ema=ema, top_logprobs=top_logprobs
    )
    serve_policy(policy, access, ServeOptions(name or target.stem, port, http_port, max_queue, max_calls), say)


@app.command()
def sample(
    target: Target,
    overrides: Overrides = None,
    run_dir: Weights = None,
    random_weights: RandomWeights = False,
    ema: Averaged = False,
    prompt: Annotated[str | None, typer.Option(help="one prompt")] = None,
    file: Annotated[Path | None, typer.Option(help="prompts, one a line; or .jsonl of prompt or tokens")] = None,
    n: Annotated[int, typer.Option(help="completions of each prompt", min=1)] = 1,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy [default: rollout.temperature]")] = None,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="[default: rollout.max_new_tokens]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends a completion; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same completions")] = 0,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="every token with its log-probability")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per completion")] = False,
) -> None:
    """Sample a policy: --prompt, --file, or line by line from the terminal or a pipe."""
    from jaxrl_llm.cli.console import write
    from jaxrl_llm.cli.policy import open_policy
    from jaxrl_llm.cli.sampling import SampleOptions, converse, read_prompts, sample_prompts, text_prompt, typed_lines

    if prompt is not None and file is not None:
        raise UserError("--prompt and --file are both given; give one, or neither to type prompts")
    stops = tuple(stop or ())
    options = SampleOptions(max_new_tokens, temperature, top_p, top_k, min_p, stops, seed, n, logprobs, as_json)
    policy = open_policy(target, overrides or (), run_dir, random_weights=random_weights, ema=ema)
    print(f"sampling with {policy.origin}", file=sys.stderr, flush=True)
    if prompt is None and file is None:
        converse(policy, options, typed_lines(sys.stdin), write)
    else:
        prompts = read_prompts(file, policy.setup) if file else [text_prompt(prompt or "", policy.setup)]
        sample_prompts(policy, prompts, options, write)


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="a run, one of its checkpoints, a Hugging Face folder or a GGUF file", metavar="CHECKPOINT"
        ),
    ],
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="where results go [default: evals/CHECKPOINT-CONFIG]")] = None,
    n: Annotated[int | None, typer.Option(help="completions of each prompt [default: eval.samples]", min=1)] = None,
    k: Annotated[list[int] | None, typer.Option(help="may be repeated [default: powers of 2 up to n, and n]")] = None,
    ema: Averaged = False,
    as_json: Annotated[bool, typer.Option("--json", help="result.json instead of a table")] = False,
) -> None:
    """avg@n, pass@k, best@k, worst@k and maj@k of a policy on CONFIG's held-out prompts; goes on where it stopped."""
    from jaxrl_llm.cli.console import print_evaluation, tell
    from jaxrl_llm.cli.measuring import evaluate_checkpoint
    from jaxrl_llm.cli.policy import open_checkpoint

    given = config_room.load(config, overrides or ())
    policy = open_checkpoint(checkpoint, given, ema=ema)
    name = checkpoint.rstrip("/").replace("/", "_").replace(":", "_")
    place = out or Path("evals") / f"{name}-{config.stem}"
    tell(f"evaluating {policy.origin}; results in {place}")
    result = evaluate_checkpoint(policy, given, place, samples=n, ks=k or (), say=tell)
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
    else:
        print_evaluation(result)


@app.command()
def passrate(
    target: Target,
    overrides: Overrides = None,
    run_dir: Weights = None,
    random_weights: RandomWeights = False,
    ema: Averaged = False,
    out: Annotated[Path | None, typer.Option(help="the file [default: NAME.passrates.jsonl]")] = None,
    n: Annotated[int, typer.Option(help="completions of each prompt: the n of Avg@n", min=1)] = 16,
) -> None:
    """Avg@n of every training prompt, for data.curriculum.pass_rates; goes on where it stopped."""
    from jaxrl_llm.cli.console import tell
    from jaxrl_llm.cli.measuring import measure_pass_rates
    from jaxrl_llm.cli.policy import open_policy

    policy = open_policy(target, overrides or (), run_dir, random_weights=random_weights, ema=ema)
    tell(f"sampling with {policy.origin}")
    measure_pass_rates(policy, out or Path(f"{target.stem}.passrates.jsonl"), samples=n, say=tell)


@app.command()
def fit(
    source: Annotated[Path, typer.Argument(help="a run directory, or a CSV or JSONL file of one curve")],
    x: Annotated[str, typer.Option(help="compute column of a file")] = "compute",
    y: Annotated[str, typer.Option(help="reward column of a file")] = "reward",
) -> None:
    """Fit the sigmoid to the first half of a curve and hold the second half against it; prints JSON."""
    from jaxrl_llm.report.fitting import fit_run
    from jaxrl_llm.scaling.curves import read_curve
    from jaxrl_llm.scaling.forecast import forecast_curve

    result = forecast_curve(read_curve(source, x, y)).describe() if source.is_file() else fit_run(source)
    typer.echo(json.dumps(result, indent=1, allow_nan=False))


@app.command()
def report(run: Run) -> None:
    """Write RUN/report.html anew from the run's files."""
    from jaxrl_llm.report.html import write_report

    typer.echo(write_report(run))


@app.command()
def summary(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False
) -> None:
    """What a run reached, from its files alone."""
    from jaxrl_llm.cli.console import print_summary
    from jaxrl_llm.report.summary import summarise

    facts = summarise(run)
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
    else:
        print_summary(facts)


@config_app.command()
def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Every key of a configuration with its value, and what it means."""
    resolved = config_room.load(config, overrides or ()).model_dump()
    for name, _, default, text in config_room.describe():
        value = _value(resolved, name)
        mark = " " if str(value) == default else "*"
        typer.echo(f"{mark} {name} = {value}   # {text}")


def _value(tree: Any, name: str) -> Any:
    """The value of a dotted name; of a key of sections in a list (`sources[].low`), that of each by its name."""
    for place, key in enumerate(keys := name.split(".")):
        if key.endswith("[]"):
            rest = ".".join(keys[place + 1 :])
            return {section["name"]: _value(section, rest) for section in tree[key.removesuffix("[]")]}
        if tree is None:
            return None
        if isinstance(tree[key], tuple | list) and name.endswith(key) and tree[key] and isinstance(tree[key][0], dict):
            return [section["name"] for section in tree[key]]
        tree = tree[key]
    return tree


@data_app.command(name="inspect")
def inspect_data(
    config: ConfigPath,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(help="rows of each source and side", min=0)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of text")] = False,
) -> None:
    """Rows as the model will see them, token counts, what is left out, and what is held out and trained on."""
    from jaxrl_llm.cli.data_inspect import inspect_data as look
    from jaxrl_llm.cli.data_inspect import lines

    found = look(config_room.load(config, overrides or ()), rows=rows)
    for line in [json.dumps(found, allow_nan=False)] if as_json else lines(found):
        typer.echo(line)


Source = Annotated[
    str,
    typer.Argument(
        help="a run directory, a Hugging Face folder, hub:OWNER/NAME, a GGUF file or package:NAME", metavar="SRC"
    ),
]
Step = Annotated[int | None, typer.Option(help="a run's checkpoint [default: the newest]")]


@app.command()
def convert(
    source: Source,
    destination: Annotated[Path, typer.Argument(help="the folder to write", metavar="DST")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 [default: as it is]")] = None,
    step: Step = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="a LoRA run's adapters alone, as PEFT has them")] = False,
    ema: Averaged = False,
) -> None:
    """Write a policy as a Hugging Face folder (config.json, safetensors, the tokenizer's files if there are any).

    A LoRA run's adapters are merged into its weights, or written alone with --adapter.
    """
    from jaxrl_llm.cli.convert import convert as run

    run(source, destination, dtype=dtype, step=step, adapter=adapter, ema=ema)
    typer.echo(destination)


@app.command()
def inspect(source: Source, step: Step = None) -> None:
    """List a checkpoint's arrays: name, dtype, shape, bytes, the first 16 digits of the SHA-256."""
    from jaxrl_llm.cli.inspect import lines

    for line in lines(source, step=step):
        typer.echo(line)


@app.command(name="aot")
def compile_ahead(
    config: ConfigPath,
    topology: Annotated[str, typer.Option(help="a TPU slice (v5e:2x2, v5p:2x2x4, v6e:4x4, ...) or h100:N")],
    overrides: Overrides = None,
) -> None:
    """Compile the train step and the decode step for devices that are not here: seconds, and GiB on each device."""
    from jaxrl_llm.cli.aot import compile_for

    for program in compile_for(config_room.load(config, overrides or ()), topology):
        typer.echo(
            f"{program.name} for {topology}: compiled in {program.seconds:.1f} s; on each device arguments "
            f"{program.argument_bytes / 2**30:.3f} GiB, peak {program.peak_bytes / 2**30:.3f} GiB"
        )


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except RunFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(FAILED)
