"""`jaxrl train` with a reward model."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_reward import CONFIG, LETTERS, reward_ids, write_reward_model

from jaxrl_llm.checkpoints.hf import read_hf_params
from jaxrl_llm.checkpoints.hf_reward import open_hf_reward
from jaxrl_llm.models.transformer import forward


@pytest.fixture
def folder(tmp_path):
    write_reward_model(tmp_path / "judge")
    return tmp_path / "judge"


def options(folder, *more):
    return ["rollout.reward=model", f"rollout.reward_model.path={folder}", *more]


def direct_score(folder, prompt, completion):
    """The score from the whole, unpadded conversation; its last token is the padding's, so the one before counts."""
    ids = reward_ids(prompt, completion)
    source = open_hf_reward(folder).folder
    params = read_hf_params(source)
    row = jnp.asarray([ids])
    hidden = forward(source.model, params, row, jnp.arange(len(ids))[None], jnp.ones_like(row))
    return float(np.asarray(hidden)[0, -2] @ params["score"][0])


@pytest.mark.parametrize(("mesh", "most"), [("null", 10), ("{data: 2, tensor: 2}", 40)])
def test_a_run_is_rewarded_by_its_reward_model(mesh, most, folder, tiny, jaxrl, records):
    """On the sampler's device with a limit that some completions exceed, and on devices of its own."""
    run = tiny.parent / "run"
    more = [f"rollout.reward_model.mesh={mesh}", f"rollout.reward_model.max_tokens={most}"]
    more += ["sft.steps=5", "train.steps=4", "eval.every=1"]
    status, _, err = jaxrl("train", tiny, *options(folder, *more), "--run-dir", run)
    assert status == 0, err
    steps, samples = records(run, "metrics"), records(run, "samples")
    scored = [s for s in samples if len(reward_ids(s["prompt"], s["completion"])) <= most]
    wanted = [direct_score(folder, s["prompt"], s["completion"]) for s in scored]
    np.testing.assert_allclose([s["reward"] for s in scored], wanted, atol=1e-4)
    assert (len(samples), len(set(wanted)) > 1) == (8, True)
    for sample in samples:
        count = len(reward_ids(sample["prompt"], sample["completion"]))
        failed = f"{count} tokens are more than the {most} that the reward model may be given"
        assert sample["reward_failed"] == (failed if count > most else None)
        assert (sample["reward"] is None) == (count > most)  # failed, and not 0
    failures = sum(record["reward_failures"] for record in steps)
    assert 0 < failures < 4 * 8 if most == 10 else failures == 0
    assert all(0 <= record["pass_rate"] <= 1 for record in steps)  # by the answers, whatever rewards are
    assert all(0 <= record["value"] <= 1 for record in records(run, "eval"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rollout.reward_model.path=null"], "rollout.reward = model, but rollout.reward_model.path = None"),
        (["rollout.reward=exact"], "rollout.reward = exact, but rollout.reward_model.path = "),
        (["rollout.reward_model.path=nowhere"], "rollout.reward_model: nowhere is not a folder with a config.json"),
        (["rollout.reward_model.max_tokens=41"], "max_tokens = 41 exceeds the model's context of 40"),
        (["rollout.reward_model.mesh={data: 8}"], "leaves no device to trainer and sampler"),
        (["rollout.reward_model.mesh={data: 0}"], "leaves no device to trainer and sampler, or has a size below 1"),
        (["rollout.reward_model.mesh={data: 3}"], "rollout.reward_model.rows: batch 8 does not divide over data 3"),
        (["rollout.reward_model.mesh={tensor: 4}"], "rollout.reward_model.mesh: layers.k: kv_heads 2 does not divide"),
        (["rollout.reward_model.chat_template=chatml"], "no special token '<|im_start|>'"),
        (["rollout.reward_model.eos='<e>'"], "tokenizer.eos '<e>' is not a token of"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(more, message, folder, tiny, jaxrl):
    run = tiny.parent / "run"
    status, _, err = jaxrl("train", tiny, *options(folder, *more), "--run-dir", run)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
    assert not run.exists()


def test_a_prompt_that_the_reward_model_cannot_read_is_refused_at_once(tiny, tmp_path, jaxrl):
    write_reward_model(tmp_path / "judge", letters=LETTERS[1:])  # without "="
    status, _, err = jaxrl("train", tiny, *options(tmp_path / "judge"), "--run-dir", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "rollout.reward_model cannot be given the prompt" in err
    assert "the character '='" in err


def test_a_folder_with_a_larger_tokenizer_than_embedding_is_refused(folder, tiny, jaxrl):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 16}))
    status, _, err = jaxrl("train", tiny, *options(folder), "--run-dir", tiny.parent / "run")
    assert status == 2
    assert "has shape (20, 16), config.json asks for (16, 16)" in err
