"""Models on the Hugging Face Hub: `hub:OWNER/NAME[@REVISION]` becomes a local folder, through huggingface_hub's cache.

Only configuration, safetensors and tokenizer files are fetched: never a pickle, never code. The client's own settings
hold: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoints.hf import TOKENIZER_FILES
from jaxrl_llm.types import UserError

PREFIX = "hub:"
_DATA = ("config.json", "chat_template.json", *TOKENIZER_FILES)
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def is_hub(source: str) -> bool:
    return source.startswith(PREFIX)


def repository(source: str) -> tuple[str, str | None]:
    """OWNER/NAME and the revision, if one is given. Raises UserError on a name that is not of this form."""
    name, at, revision = source.removeprefix(PREFIX).partition("@")
    if name.count("/") != 1 or not all(name.split("/")) or (at and not revision):
        raise UserError(f"{source!r} is not of the form {PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME@REVISION")
    return name, revision or None


def hub_snapshot(source: str, *, weights: bool = True, adapter: bool = False, offline: bool = False) -> Path:
    """The folder that `source` stands for; its name is the commit. What the cache has is not fetched again.

    Without `weights` only configuration and tokenizer come, with `adapter` only a PEFT adapter's files; `offline` asks
    the cache alone. If the Hub cannot be reached, a complete copy in the cache serves. Raises UserError if
    huggingface_hub is not installed, if the repository or its revision does not exist or is not open to this user, and
    if neither Hub nor cache has the files.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise UserError(f"{source!r} needs huggingface_hub; install it with pip install 'jaxrl_llm[hub]'") from None
    name, revision = repository(source)
    wanted = _ADAPTER if adapter else (*_DATA, *(_WEIGHTS if weights else ()))
    how: dict[str, Any] = {"allow_patterns": list(wanted), "ignore_patterns": ["*/*"]}
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=offline, **how))
    except errors.HFValidationError as error:
        raise UserError(f"{source!r} does not name a repository: {_one_line(error)}") from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{source!r}: {name} has no revision {revision or 'main'!r}; give a branch, tag or commit"
        ) from None
    except errors.GatedRepoError:
        raise UserError(
            f"{source!r} is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{source!r}: there is no repository {name}, or it is private; check the name, or set HF_TOKEN to a token "
            "that may read it"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{source!r}: the Hub cannot be reached and the cache has no complete copy ({_one_line(error)}); check the "
            "network and HF_HUB_OFFLINE, or give a local folder"
        ) from None
    except OSError as error:  # also whatever else HTTP answers
        raise UserError(f"{source!r} could not be fetched: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
