"""`jaxrl`: the commands and the one place where errors become messages and exit codes."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxrl_llm import config as config_room
from jaxrl_llm.types import RunFailedError, UserError

USER_ERROR, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")


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

    run_training(config_room.load(config, overrides or ()), run_dir or Path("runs") / config.stem, reinforce=False)


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
        value = resolved
        for key in name.split("."):
            value = value[key]
        mark = " " if str(value) == default else "*"
        typer.echo(f"{mark} {name} = {value}   # {text}")


Source = Annotated[
    str, typer.Argument(help="a run directory, a Hugging Face folder, a GGUF file or package:NAME", metavar="SRC")
]
Step = Annotated[int | None, typer.Option(help="a run's checkpoint [default: the newest]")]


@app.command()
def convert(
    source: Source,
    destination: Annotated[Path, typer.Argument(help="the Hugging Face folder to write", metavar="DST")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 [default: as it is]")] = None,
    step: Step = None,
) -> None:
    """Write a policy as a Hugging Face folder (config.json, safetensors, the tokenizer's files if there are any)."""
    from jaxrl_llm.cli.convert import convert as run

    run(source, destination, dtype=dtype, step=step)
    typer.echo(destination)


@app.command()
def inspect(source: Source, step: Step = None) -> None:
    """List a checkpoint's arrays: name, dtype, shape, bytes, the first 16 digits of the SHA-256."""
    from jaxrl_llm.cli.inspect import lines

    for line in lines(source, step=step):
        typer.echo(line)


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except RunFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(FAILED)
