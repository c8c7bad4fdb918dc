"""`jaxrl convert`: a run's checkpoint, a GGUF file or a Hugging Face folder as a Hugging Face folder."""

from pathlib import Path

from jaxrl_llm.checkpoints.hf import is_hf_folder, write_hf
from jaxrl_llm.checkpoints.hf_config import to_hf_config
from jaxrl_llm.checkpoints.hub import is_hub
from jaxrl_llm.checkpoints.peft import write_peft
from jaxrl_llm.cli.source import is_run, read_policy, run_checkpoints
from jaxrl_llm.types import UserError

DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: str,
    destination: Path,
    *,
    dtype: str | None,
    step: int | None,
    adapter: bool = False,
    ema: bool = False,
) -> None:
    """Writes `destination`, which must not exist; see `read_policy` for the sources.

    With `adapter` the adapters of a LoRA run alone, as a folder in PEFT's layout; without, they are merged. With `ema`
    a run's averaged weights or adapters.

    The weights keep their dtype unless one is given (a GGUF file's are float32 once dequantised, averages are too). A
    folder's, or the run's starting folder's, config.json and tokenizer files come along.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: known are {', '.join(DTYPES)}")
    if destination.exists():  # before a model is read for nothing
        raise UserError(f"{destination} exists; give a folder that does not")
    if adapter:
        _write_adapter(source, destination, dtype, step, ema)
        return
    policy = read_policy(source, step=step, dtype=dtype, ema=ema)
    write_hf(destination, policy.model, policy.params, policy.hf_config, dtype=dtype, beside=policy.beside)


def _write_adapter(source: str, destination: Path, dtype: str | None, step: int | None, ema: bool) -> None:
    if not is_run(Path(source)):
        raise UserError(f"--adapter exports the adapters of a LoRA run; {source} is not a run directory")
    config, store, step = run_checkpoints(Path(source), step)
    if config.adapters is None:
        raise UserError(f"--adapter: {source} trained the whole policy (lora.rank = 0); leave it out")
    to_hf_config(config.model)  # refuses what no Hugging Face family has
    base = config.model.init
    named = base if base is not None and (is_hub(base) or is_hf_folder(Path(base))) else None
    adapters = store.read_params(step, ema=ema)
    write_peft(destination, config.model, config.adapters, adapters, base=named, dtype=dtype)
