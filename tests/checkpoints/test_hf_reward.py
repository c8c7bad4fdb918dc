"""Reward models of every family against transformers' scores (tests/reference/make_reward_models.py); batching."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import DATA, write_tensors
from reward_models import NAMES, PAD, TEXTS, write_reward_folder

from jaxrl_llm.checkpoints.hf import read_hf_params
from jaxrl_llm.checkpoints.hf_reward import open_hf_reward
from jaxrl_llm.models.reward_model import SequenceScorer, reward_shardings, sequence_scores
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.types import UserError


@pytest.fixture(scope="module")
def reference():
    with np.load(DATA / "reward_models.npz") as stored:
        return dict(stored)


def make_scorer(path, devices=1, dtype="float32", **axes):
    source = open_hf_reward(path)
    model = source.folder.model.model_copy(update={"param_dtype": dtype, "compute_dtype": dtype})
    mesh = make_mesh(axes, jax.devices()[:devices])
    params = read_hf_params(source.folder, dtype, reward_shardings(model, mesh))
    return SequenceScorer(model, params, mesh=mesh, rows=4, max_tokens=64, pad_id=source.pad_id)


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_padded_rows_are_the_references(name, reference, tmp_path):
    write_reward_folder(tmp_path / name, name)
    source = open_hf_reward(tmp_path / name)
    assert source.pad_id == PAD
    rows = [text for text in TEXTS if text[-1] != PAD]
    lengths = np.array([len(row) for row in rows], np.int32)
    # What stands behind a text is any token, since it must not matter.
    tokens = np.full((len(rows), 40), 17, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    scores = jax.jit(partial(sequence_scores, source.folder.model))(read_hf_params(source.folder), tokens, lengths)
    wanted = np.array([score for text, score in zip(TEXTS, reference[name], strict=True) if text[-1] != PAD])
    np.testing.assert_allclose(scores, wanted, atol=1e-4)
    assert np.abs(wanted).max() > 0.5  # 1e-4 is little beside the scores


def test_the_scorer_takes_the_last_token_that_is_no_padding_and_compiles_once_per_bucket(reference, tmp_path):
    write_reward_folder(tmp_path / "m", "llama31")
    score = make_scorer(tmp_path / "m")
    np.testing.assert_allclose(score(TEXTS), reference["llama31"], atol=1e-4)  # two texts end with padding
    assert score.compiled == score.buckets == (32, 64)
    programs = dict(score._programs)
    alone = np.concatenate([score([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, reference["llama31"], atol=1e-4)
    lengths = [[7] * n for n in range(1, 65)]
    assert len(score(lengths)) == 64
    assert score._programs == programs  # 69 more texts of 64 lengths, and no new program
    same = score([TEXTS[1]] * 5 + [TEXTS[2]] + [TEXTS[1]] * 5)
    assert len(set(np.delete(same, 5).tolist())) == 1  # to the bit: siblings that say the same


def test_a_model_cut_up_over_devices_gives_the_same_scores(reference, tmp_path):
    write_reward_folder(tmp_path / "m", "llama31")
    score = make_scorer(tmp_path / "m", devices=8, data=2, fsdp=2, tensor=2)
    np.testing.assert_allclose(score(TEXTS[:1]), reference["llama31"][:1], atol=1e-4)
    with pytest.raises(UserError, match="kv_heads 2 does not divide over tensor 4"):
        make_scorer(tmp_path / "m", devices=4, tensor=4)


def test_in_bfloat16_only_the_head_stays_float32(reference, tmp_path):
    write_reward_folder(tmp_path / "m", "llama31")
    scores = make_scorer(tmp_path / "m", dtype="bfloat16")(TEXTS[:1])
    assert 1e-4 < np.abs(scores - reference["llama31"][:1]).max() < 0.05
    assert scores.astype(jnp.bfloat16).astype(np.float32) != scores  # not rounded at the end


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "gives the model 2 labels; a reward model"),
        ({"id2label": None, "label2id": None}, "gives the model 2 labels"),  # what transformers takes that to mean
        ({"id2label": None, "num_labels": 3}, "gives the model 3 labels"),
        ({"num_labels": 2}, "num_labels is 2, but id2label has 1 labels"),
        ({"num_labels": "one"}, "num_labels is 'one'"),
        ({"id2label": ["LABEL_0"]}, "id2label is .'LABEL_0'.; an object is wanted"),
        ({"architectures": ["LlamaForCausalLM"]}, "is .'LlamaForCausalLM'.; a reward model is a decoder with"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "Qwen2ForRewardModel"),
        ({"architectures": None}, "architectures is None"),
        ({"pad_token_id": "x"}, "pad_token_id is 'x'"),
        ({"rope_theta_2": 1}, "field rope_theta_2 = 1 is unknown"),
    ],
)
def test_a_config_that_is_no_reward_models_is_refused(changed, message, tmp_path):
    write_reward_folder(tmp_path / "m", "llama31", **changed)
    with pytest.raises(UserError, match=message):
        open_hf_reward(tmp_path / "m")


def test_labels_may_be_counted_instead_of_named(tmp_path):
    write_reward_folder(tmp_path / "m", "llama31", id2label=None, label2id=None, num_labels=1)
    assert open_hf_reward(tmp_path / "m").folder.model.tie_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("score.weight"), "tensor 'score.weight' is missing"),
        (lambda t: t.update({"score.weight": np.zeros((2, 32), np.float32)}), r"score.weight' has shape \(2, 32\)"),
        (lambda t: t.update({"score.bias": np.zeros(1, np.float32)}), "tensor 'score.bias' is unexpected"),
        (lambda t: t.update({"lm_head.weight": np.zeros((64, 32), np.float32)}), "'lm_head.weight' is unexpected"),
        (lambda t: t.pop("model.norm.weight"), "tensor 'model.norm.weight' is missing"),
    ],
)
def test_tensors_that_are_no_reward_models_are_refused(change, message, tmp_path):
    tensors = write_reward_folder(tmp_path / "m", "llama31")
    change(tensors)
    write_tensors(tmp_path / "m", tensors)
    with pytest.raises(UserError, match=message):
        open_hf_reward(tmp_path / "m")


def test_a_head_that_is_not_finite_is_refused_when_it_is_read(tmp_path):
    tensors = write_reward_folder(tmp_path / "m", "llama31")
    tensors["score.weight"][0, 5] = np.nan
    write_tensors(tmp_path / "m", tensors)
    with pytest.raises(UserError, match="holds values that are not finite"):
        make_scorer(tmp_path / "m")
