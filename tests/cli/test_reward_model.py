"""`jaxrl train` with a reward model."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_reward import CONFIG, LETTERS, reward_ids, write_reward_model

from jaxrl_llm.checkpoints.hf import read_hf_params
from jaxrl_llm.checkpoints.hf_reward import open_hf_reward
from jaxrl_llm.cli.assemble import assemble
from jaxrl_llm.cli.reward import open_rewards
from jaxrl_llm.config import load
from jaxrl_llm.models.transformer import forward
from jaxrl_llm.types import Completion


@pytest.fixture
def folder(tmp_path):
    write_reward_model(tmp_path / "judge")
    return tmp_path / "judge"


def options(folder, *more):
    return ["rollout.rewards={model: 1}", f"rollout.reward_model.path={folder}", *more]


def direct_score(folder, prompt, completion):
    """The score from the whole, unpadded conversation; its last token is the padding's, so the one before counts."""
    ids = reward_ids(prompt, completion)
    row, places = np.zeros((1, 32), np.int32), np.arange(32, dtype=np.int32)[None]
    row[0, : len(ids)] = ids
    hidden, score = hidden_states(folder)(row, places, (places < len(ids)).astype(np.int32))
    return float(np.asarray(hidden)[0, len(ids) - 2] @ score)


@functools.cache
def hidden_states(folder):
    source = open_hf_reward(folder).folder
    params = jax.tree.map(jnp.asarray, read_hf_params(source))
    return jax.jit(lambda *row: (forward(source.model, params, *row), params["score"][0]))


def test_a_run_is_rewarded_by_its_reward_model(folder, tiny, jaxrl, records):
    """With a limit that some completions exceed."""
    run, most = tiny.parent / "run", 10
    more = [f"rollout.reward_model.max_tokens={most}", "sft.steps=5", "train.steps=4", "eval.every=1"]
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
    assert 0 < sum(record["reward_failures"] for record in steps) < 4 * 8
    assert all(0 <= record["pass_rate"] <= 1 for record in steps)  # by the answers, whatever rewards are
    assert all(0 <= record["value"] <= 1 for record in records(run, "eval"))


def test_a_reward_model_may_have_devices_of_its_own(folder, tiny):
    setup = assemble(load(tiny, options(folder, "rollout.reward_model.mesh={data: 2, tensor: 2}")))
    meshes = (setup.trainer_mesh, setup.engine.mesh, setup.reward_mesh)
    assert [[d.id for d in mesh.devices.flat] for mesh in meshes] == [[0], [1], [4, 5, 6, 7]]
    task = setup.train_tasks[0]
    texts = ("4", "12", "", "=+")
    made = [np.array([*setup.tokenizer.encode(text), setup.tokenizer.eos_id], np.int32) for text in texts]
    completions = [Completion(ids, ids * np.float32(0), ids * 0, ids < 0, "stop") for ids in made]
    rewards = [e.reward for e in open_rewards(setup).environment().episodes(task, completions)]
    wanted = [direct_score(folder, task.prompt, setup.environment.text(c)) for c in completions]
    np.testing.assert_allclose([r.value for r in rewards], wanted, atol=1e-4)
    assert [r.parts["correct"] for r in rewards] == [float(text == task.answer) for text in texts]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rollout.reward_model.path=null"], "rollout.rewards = {'model': 1.0}, but rollout.reward_model.path = None"),
        (["rollout.rewards={answer: 1}"], "rollout.rewards = {'answer': 1.0}, but rollout.reward_model.path = "),
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
