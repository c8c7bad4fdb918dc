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


@app.command(epilog=_keys())
def sampler(
    config: ConfigPath,
    overrides: Overrides = None,
    trainer: Annotated[
        str | None,
        typer.Option(help="where to register: host:port, file:PATH or dns:NAME:PORT [default: wait to be dialled]"),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(help="host:port; port 0 takes a free one, a host but this machine's own needs a token and TLS"),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str | None, typer.Option(help="host:port under which trainer and samplers reach this one [default: --listen]")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="file of the token [default: $JAXRL_SERVE_TOKEN]")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key of the certificate")] = None,
    tls_authority: Annotated[
        Path | None, typer.Option(help="PEM file of who signed the trainer's certificate [default: plain connections]")
    ] = None,
    patience: Annotated[
        float, typer.Option(help="seconds without a trainer after which a sampler that registers gives up", min=0)
    ] = 600.0,
) -> None:
    """Sample for a trainer in another process, with the weights that it sends; ends with its run.

    CONFIG is the trainer's. Give --trainer, or name this sampler in the trainer's sampler.workers.
    """
    from jaxrl_llm.sampler.serving.access import check_access, read_token
    from jaxrl_llm.worlds.dialling import host_and_port
    from jaxrl_llm.worlds.discovery import check_place

    host, port = host_and_port(listen, "--listen")
    access = check_access(host, read_token(token_file), tls_cert, tls_key)
    if trainer is not None:
        check_place(trainer, "--trainer")
    if advertise is not None:
        host_and_port(advertise, "--advertise")
    from jaxrl_llm.cli.console import say
    from jaxrl_llm.cli.sampler import WorldOptions, run_sampler
    from jaxrl_llm.cli.worlds import credentials

    run_sampler(
        config_room.load(config, overrides or ()),
        access,
        credentials(token_file, tls_authority),
        WorldOptions(trainer, port, advertise, patience),
        say,
    )


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
    from jaxrl_llm.cli.console import ablations, write
    from jaxrl_llm.cli.policy import open_policy
    from jaxrl_llm.cli.sampling import SampleOptions, converse, read_prompts, sample_prompts, text_prompt, typed_lines

    if prompt is not None and file is not None:
        raise UserError("--prompt and --file are both given; give one, or neither to type prompts")
    stops = tuple(stop or ())
    options = SampleOptions(max_new_tokens, temperature, top_p, top_k, min_p, stops, seed, n, logprobs, as_json)
    policy = open_policy(target, overrides or (), run_dir, random_weights=random_weights, ema=ema)
    for line in (f"sampling with {policy.origin}", *ablations(policy.setup.config.model)):
        print(line, file=sys.stderr, flush=True)
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


Law = Annotated[
    str, typer.Option(help="sigmoid, power_law; tables: tan, tan_line, isocompute, kaplan_N, chinchilla, ...")
]
XColumn = Annotated[
    str | None, typer.Option("--x", help="compute column, metric or tag; several columns of a law with commas")
]
YColumn = Annotated[str | None, typer.Option("--y", help="reward (or loss) column, metric or tag")]
Lower = Annotated[float, typer.Option(help="least reward there can be")]
Upper = Annotated[float, typer.Option(help="greatest reward there can be")]
JsonOut = Annotated[
    str | None, typer.Option("--json", help="JSON, an object a line, to a file or to - (standard output)")
]
PlotOut = Annotated[Path | None, typer.Option("--plot", help="a figure: .png or .svg")]
UpTo = Annotated[str | None, typer.Option(help="fit the points up to this compute, or to this share of it (50%)")]


@app.command()
def fit(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="CSV, JSONL, JSON, W&B exports, TensorBoard logs, run directories", metavar="FILE_OR_RUN..."
        ),
    ],
    law: Law = "sigmoid",
    protocol: Annotated[str, typer.Option(help="least_squares, or published: ScaleRL's grids")] = "least_squares",
    upto: UpTo = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="hold a parameter, for example R0=0.35; may be repeated")
    ] = None,
    at: Annotated[list[float] | None, typer.Option(help="a compute to forecast; may be repeated")] = None,
    lower: Lower = 0.0,
    upper: Upper = 1.0,
    x: XColumn = None,
    y: YColumn = None,
    group: Annotated[str | None, typer.Option(help="column that tells the curves (or models) of a table apart")] = None,
    json_out: JsonOut = None,
    plot: PlotOut = None,
) -> None:
    """Fit a scaling law to every curve: parameters with intervals, forecasts, and what the data does not tell."""
    from jaxrl_llm.cli.fit import FitOptions, fit_sources

    fit_sources(
        sources, FitOptions(law, protocol, upto, fix or (), at or (), lower, upper, x, y, group, json_out, plot)
    )


@app.command()
def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="as for fit; the same NAME again adds a seed; the first is the reference", metavar="[NAME=]RUN..."
        ),
    ],
    margin: Annotated[float, typer.Option(help="asymptotes nearer than this count as equal")] = 0.02,
    level: Annotated[float, typer.Option(help="confidence that a verdict needs")] = 0.95,
    upto: UpTo = None,
    at: Annotated[
        float | None, typer.Option(help="compute at which advice to stop judges [default: the longest]")
    ] = None,
    lower: Lower = 0.0,
    upper: Upper = 1.0,
    x: XColumn = None,
    y: YColumn = None,
    group: Annotated[str | None, typer.Option(help="column of a table's recipes")] = None,
    seed: Annotated[str | None, typer.Option(help="column that tells the seeds of a recipe apart")] = None,
    json_out: JsonOut = None,
    plot: PlotOut = None,
) -> None:
    """Which recipe is better: A first, then B at a common A; and which unfinished runs are not worth going on with."""
    from jaxrl_llm.cli.compare import CompareOptions, compare_sources

    compare_sources(sources, CompareOptions(margin, level, upto, at, lower, upper, x, y, group, seed, json_out, plot))


@app.command()
def plan(
    budget: Annotated[float, typer.Argument(help="FLOPs, for isocompute in --unit, for tan in the table's own")],
    table: Annotated[Path | None, typer.Argument(help="data to fit first [default: published constants]")] = None,
    law: Annotated[str, typer.Option(help="chinchilla, kaplan_ND, tan or isocompute")] = "chinchilla",
    x: Annotated[str | None, typer.Option(help="the law's columns, with commas; a sweep's are B_p,n,C")] = None,
    y: Annotated[str | None, typer.Option(help="the law's response [default: loss; a sweep's: reward]")] = None,
    group: Annotated[str | None, typer.Option(help="tan: column of the models")] = None,
    size: Annotated[list[float] | None, typer.Option(help="a model size of the IsoFLOP table; may be repeated")] = None,
    unit: Annotated[str, typer.Option(help="isocompute's budget: rollouts, tokens or flops")] = "rollouts",
    prompts: Annotated[int, typer.Option(help="B_p, where no sweep tells it", min=1)] = 32,
    difficulty: Annotated[str, typer.Option(help="of the published n*(C): easy or hard")] = "easy",
    width: Annotated[float, typer.Option(help="bucket of the sweep's rewards")] = 0.01,
    margin: Annotated[float, typer.Option(help="a smaller B_p may lose so much reward")] = 0.01,
    lower: Lower = 0.0,
    upper: Upper = 1.0,
    params: Annotated[float | None, typer.Option(help="the policy's parameters, for the FLOPs of a step")] = None,
    prompt_tokens: Annotated[float, typer.Option(help="mean length of a prompt")] = 0.0,
    completion_tokens: Annotated[float | None, typer.Option(help="mean length of a completion")] = None,
    device: Annotated[str | None, typer.Option(help="for device-hours, as JAX calls it, for example 'TPU v5e'")] = None,
    peak: Annotated[float | None, typer.Option(help="FLOP/s of another device")] = None,
    utilisation: Annotated[float, typer.Option(help="share of the peak that is reached")] = 0.4,
    json_out: JsonOut = None,
) -> None:
    """How to spend a budget: model size and tokens, or rollouts, prompts and steps, with FLOPs and device-hours."""
    from jaxrl_llm.cli.plan import PlanOptions, plan_budget

    plan_budget(
        budget,
        table,
        PlanOptions(
            law=law,
            x=x,
            y=y,
            group=group,
            sizes=size or (),
            unit=unit,
            prompts=prompts,
            difficulty=difficulty,
            width=width,
            margin=margin,
            lower=lower,
            upper=upper,
            params=params,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            device=device,
            peak=peak,
            utilisation=utilisation,
            json=json_out,
        ),
    )


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


@app.command()
def simulate(
    config: ConfigPath,
    costs: Annotated[Path, typer.Option(help="a JSON file of what steps and tokens cost, see docs/pipeline.md")],
    chips: Annotated[int, typer.Option(help="chips to share out between trainer and samplers", min=2)],
    overrides: Overrides = None,
    trainer_multiple: Annotated[int, typer.Option(help="the trainer's chips are a multiple of this", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="simulated steps; the first fourth is not counted", min=4)] = 40,
) -> None:
    """Predict throughput, idle shares and lag for every split of so many chips, and recommend one; prints JSON."""
    from jaxrl_llm.cli.simulating import simulate as run

    loaded = config_room.load(config, overrides or ())
    found = run(loaded, costs, chips=chips, trainer_multiple=trainer_multiple, steps=steps)
    typer.echo(json.dumps(found, indent=1, allow_nan=False))


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except RunFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(FAILED)
