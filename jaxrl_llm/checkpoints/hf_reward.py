"""Reward models in Hugging Face's layout of sequence classification: a decoder's folder with `score.weight` [1, D].

`model.*` is as in every folder of the family, a head over the vocabulary is not there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.checkpoints.hf import HfFolder, check_tensors, read_hf_config, read_hf_tables
from jaxrl_llm.checkpoints.hf_config import from_hf_config
from jaxrl_llm.checkpoints.hf_tensors import HfTensor, hf_tensors, is_derived
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.types import UserError

_ARCHITECTURE = "ForSequenceClassification"
_LABELS = ("num_labels", "id2label", "label2id")
_TRANSFORMERS_LABELS = 2  # what transformers takes a file to mean that says nothing about labels


@dataclass(frozen=True)
class RewardFolder:
    """A checked folder. `pad_id`: the score is taken at the last token that is another one; None takes the last."""

    folder: HfFolder
    pad_id: int | None


def reward_tensors(model: ModelConfig) -> Iterator[HfTensor]:
    """Every tensor of a reward model, whose ModelConfig has tied embeddings."""
    yield from hf_tensors(model)
    shape = (1, model.d_model)
    yield HfTensor("score.weight", (("score",),), (), shape, shape, (0, 1))


def open_hf_reward(path: str | Path) -> RewardFolder:
    """Checks a folder without reading weights; its `folder.model` has tied embeddings, whatever the file says.

    Raises UserError as `open_hf`, and if config.json is not that of a sequence classification with one label.
    """
    path, raw = Path(path), read_hf_config(path)
    where = path / "config.json"
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not str(named[0]).endswith(_ARCHITECTURE):
        raise UserError(
            f"{where}: architectures is {named!r}; a reward model is a decoder with {_ARCHITECTURE}, such as "
            f"['Llama{_ARCHITECTURE}']"
        )
    if (labels := _labels(raw, where)) != 1:
        raise UserError(f"{where} gives the model {labels} labels; a reward model has 1")
    pad_id = raw.get("pad_token_id")
    if pad_id is not None and (not isinstance(pad_id, int) or isinstance(pad_id, bool)):
        raise UserError(f"{where}: pad_token_id is {pad_id!r}; a token id or null is wanted")
    try:
        model = from_hf_config({name: value for name, value in raw.items() if name not in _LABELS})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    model = model.model_copy(update={"tie_embeddings": True})
    stored = read_hf_tables(path)
    expected = check_tensors(path, stored, reward_tensors(model))
    if unexpected := sorted(name for name in stored.keys() - expected if not is_derived(name)):
        raise UserError(f"{path}: tensor {unexpected[0]!r} is unexpected; a reward model has no such weight")
    return RewardFolder(HfFolder(path, raw, model, stored, reward_tensors), pad_id)


def _labels(raw: dict, where: Path) -> int:
    count, names = raw.get("num_labels"), raw.get("id2label")
    if names is not None and not isinstance(names, dict):
        raise UserError(f"{where}: id2label is {names!r}; an object is wanted")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise UserError(f"{where}: num_labels is {count!r}; a number is wanted")
    if count is not None and names is not None and count != len(names):
        raise UserError(f"{where}: num_labels is {count}, but id2label has {len(names)} labels")
    return count if count is not None else len(names) if names is not None else _TRANSFORMERS_LABELS
