"""`jaxrl convert`: a run's checkpoint, a GGUF file or a Hugging Face folder as a Hugging Face folder."""

from pathlib import Path

from jaxrl_llm.checkpoints.hf import write_hf
from jaxrl_llm.cli.source import read_policy
from jaxrl_llm.types import UserError

DTYPES = ("float32", "bfloat16", "float16")


def convert(source: str, destination: Path, *, dtype: str | None, step: int | None) -> None:
    """Writes `destination`, which must not exist; see `read_policy` for the sources.

    The weights keep their dtype unless one is given (a GGUF file's are float32 once dequantised). A folder's, or the
    run's starting folder's, config.json and tokenizer files come along.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: known are {', '.join(DTYPES)}")
    if destination.exists():  # before a model is read for nothing
        raise UserError(f"{destination} exists; give a folder that does not")
    policy = read_policy(source, step=step)
    write_hf(destination, policy.model, policy.params, policy.hf_config, dtype=dtype, beside=policy.beside)
