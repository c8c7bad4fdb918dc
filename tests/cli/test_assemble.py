import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.cli.assemble import assemble, supervised_examples, with_tokenizer
from jaxrl_llm.cli.join import Joined, _sampling
from jaxrl_llm.cli.tasks import encoded, heldout_tasks
from jaxrl_llm.config import load
from jaxrl_llm.data.sources import load_sources
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.types import Completion, UserError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("which", "right", "wrong"), [("none", 1, -1), ("all", 0.5, -1.5), ("correct", 0.5, -1)])
def test_length_penalty_reaches_the_reward(tiny, which, right, wrong):
    # limit 4, cache 2: a completion of 3 tokens (two digits and the end) is one token into the cache
    overrides = [f"rollout.length_penalty={which}", "rollout.length_limit=4", "rollout.length_cache=2"]
    setup = assemble(load(tiny, overrides))
    task = next(task for task in setup.train_tasks if len(task.answer) == 2)
    rewards = []
    for answer in (task.answer, task.answer[::-1] if task.answer != task.answer[::-1] else "99"):
        ids = np.array([*setup.tokenizer.encode(answer), setup.tokenizer.eos_id], np.int32)
        completion = Completion(ids, np.zeros(len(ids)), np.zeros(len(ids), np.int32), np.zeros(len(ids), bool), "stop")
        rewards.append(setup.environment.episodes(task, [completion])[0].reward.value)
    assert rewards == [right, wrong]


def test_dapo_shapes_lengths_as_published():
    rollout = load(CONFIGS / "recipes/dapo.yaml", ["model.max_context=32768", "train.row_length=128"]).rollout
    assert (rollout.length_penalty, rollout.length_limit, rollout.length_cache) == ("all", 20480, 4096)


def test_prompts_through_a_tokenizer_json_and_its_template(tiny, tmp_path):
    """The folder's own ids, template and end; the model takes its rows from it."""
    specials = ["<bos>", "<end>", "<turn>"]
    characters = [*specials, *"0123456789+=\n"]
    added = [{"id": i, "content": name, "special": True, "normalized": False} for i, name in enumerate(specials)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(characters)}, "unk_token": "<bos>"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    spec = {
        "version": "1.0",
        "added_tokens": [token | flags for token in added],
        "pre_tokenizer": split,
        "model": model,
    }
    spec |= {"normalizer": None, "post_processor": None, "decoder": {"type": "Fuse"}}
    config = {"bos_token": "<bos>", "eos_token": "<end>"}
    config["chat_template"] = "{{ bos_token }}<turn>{{ messages[0].content }}<turn>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    overrides = ["tokenizer.kind=hf", f"tokenizer.path={tmp_path}", "tokenizer.chat_template=model"]
    setup = assemble(load(tiny, [*overrides, "rollout.max_prompt_tokens=7", "data.sources.addition.low=1"]))
    assert setup.config.model.vocab_size == len(characters)
    task = setup.train_tasks[0]
    assert task.tokens_T.tolist() == [0, 2, *setup.tokenizer.encode(task.prompt), 2]
    assert setup.tokenizer.eos_id == 1
    with pytest.raises(UserError, match=r"model\.vocab_size = 99, but the tokenizer has 16"):
        assemble(load(tiny, [*overrides, "model.vocab_size=99"]))
    with pytest.raises(UserError, match="'<stop>' is not a token of"):
        assemble(load(tiny, [*overrides, "tokenizer.eos=<stop>"]))


def test_every_key_of_the_sampler_reaches_it(tiny):
    sampler = ["kv_dtype=int8", "int8_weights=true", "prefill_chunk=3", "prefill_buckets=[2,3]", "refill_slots=5"]
    more = ["sampler.recompute_kv=true", "rollout.repetition_limit=7"]
    config = load(tiny, [f"sampler.{option}" for option in sampler] + more)
    setup = assemble(config)
    engine = setup.engine
    assert (engine.kv_dtype, engine.prefill_chunk, engine.buckets) == ("int8", 3, (2, 3))
    params = init_params(engine.model, 0)
    loaded = engine.load_params(params)
    assert loaded["layers"][0]["q"].values.dtype == "int8"
    scheduler = Joined._scheduler(SimpleNamespace(setup=setup, engine=engine), params, 3)
    assert (scheduler._refill, scheduler._recompute_kv, scheduler.version) == (5, True, 3)
    assert _sampling(config, 1.0).repetition_limit == 7


def test_the_rate_of_a_run_is_that_of_its_batch(tiny):
    config = load(tiny, ["optimizer.lr=0.01"])
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    scaled = assemble(load(tiny, ["optimizer.lr=0.01", f"optimizer.lr_batch={4 * completions}"])).config.optimizer
    assert (scaled.lr, scaled.lr_batch) == (pytest.approx(0.005), None)
    assert assemble(config).config.optimizer.lr == 0.01


def test_the_warm_up_learns_right_completions_of_every_source_that_has_some(tiny):
    file = tiny.parent / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"={n}=", "answer": str(n)}) + "\n" for n in range(10, 40)))
    sources = (
        "{name: sums, kind: arithmetic, low: 1, high: 4, heldout: 1}",
        "{name: programs, kind: programs, high: 3, longest: 1, heldout: 1, train: null}",
        f"{{name: unknown, kind: jsonl, path: {file}, reward: math}}",
    )
    shape = ["rollout.max_prompt_tokens=9", "rollout.max_new_tokens=15", "model.max_context=24", "eval.prompts=1"]
    setup = assemble(load(tiny, [f"data.sources=[{','.join(sources)}]", *shape]))
    decode, eos = setup.tokenizer.decode, setup.tokenizer.eos_id
    draw = supervised_examples(setup)
    learnt = {decode(p): decode(gold[:-1]) for s in range(60) for p, gold in zip(*draw(s), strict=True)}
    assert len(learnt) == 15 + 8  # nothing of the third source, whose answers are no completions
    assert (learnt["1+3="], learnt["code *2:"]) == ("4", "f=lambda x:x*2")
    assert all(gold[-1] == eos for gold in draw(0)[1])
    with pytest.raises(UserError, match="is not in the tokenizer's vocabulary"):  # of the tests nothing is learnt
        setup.tokenizer.encode('"')
    shape[1] = "rollout.max_new_tokens=14"
    with pytest.raises(
        UserError, match=r"right completion 'f=lambda x:x.\d' \(programs/.*needs 15 tokens with its end"
    ):
        assemble(load(tiny, [f"data.sources=[{','.join(sources)}]", *shape]))
    alone = assemble(load(tiny, [f"data.sources=[{sources[2]}]", "data.sources.unknown.heldout=1", *shape]))
    with pytest.raises(UserError, match="needs right completions: a source with reward exact or normalised"):
        supervised_examples(alone)


@pytest.mark.parametrize("name", ["quickstart", "mixture", "math_code"])
def test_what_the_small_configurations_name_fits(name):
    """Prompts, right completions and held-out prompts of every source."""
    config = load(CONFIGS / f"{name}.yaml")
    sources = load_sources(config.data.sources, seed=config.data.seed, overlap=config.data.overlap)
    config, tokenizer = with_tokenizer(config, sources)
    tasks = encoded(config, tokenizer, sources)
    assert all(task.gold for source in tasks for task in source.train)
    assert {task.source for task in heldout_tasks(config, tasks)} == {source.name for source in tasks}
