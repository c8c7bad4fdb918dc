import pytest
import yaml

from jaxrl_llm.config import RunConfig, describe, differences, dump, load, validate
from jaxrl_llm.types import UserError


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_dump_and_validate_are_inverse(tmp_path):
    config = load(write(tmp_path, "optimizer: {lr: 1e-6}\nrollout: {group_size: 4}"))
    assert config.optimizer.lr == 1e-6  # YAML 1.1 reads 1e-6 as a string
    assert validate(yaml.safe_load(dump(config)), "dump") == config


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("3", 3.0), ("-2.5E+3", None), ("0.5", 0.5)])
def test_override_numbers(tmp_path, text, value):
    path = write(tmp_path, "{}")
    if value is None:
        with pytest.raises(UserError, match=r"optimizer.lr = -2500.0 .*greater than or equal to 0"):
            load(path, [f"optimizer.lr={text}"])
    else:
        assert load(path, [f"optimizer.lr={text}"]).optimizer.lr == value


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("optimizer: {lrr: 1}", None, r"unknown key 'optimizer.lrr' in .*did you mean optimizer.lr"),
        ("optimiser: {lr: 1}", None, r"unknown key 'optimiser' .*did you mean optimizer"),
        ("group_size: 3", None, r"unknown key 'group_size' .*did you mean rollout.group_size"),
        ("train: {steps: many}", None, r"train.steps = 'many' in .*valid integer"),
        ("train: {steps: 1.5}", None, r"train.steps = 1.5 in .*integer"),
        ("train: {steps: true}", None, r"train.steps = True in .*number is wanted"),
        ("train: {remat: true}", None, r"train.remat = True in .*'none', 'dots', 'dots_no_batch' or 'full'"),
        ("train: {ema: 1}", None, r"train.ema = 1 in .*less than 1"),
        ("train: {steps: 0}", None, r"train.steps = 0 in .*greater than 0"),
        ("optimizer: {lr: .nan}", None, r"optimizer.lr = nan in "),
        ("algorithm: {ratio_cap: .inf}", None, r"algorithm.ratio_cap = inf in .*finite"),
        ("algorithm: {objective: cipso}", None, r"algorithm.objective = 'cipso' in .*'cispo'"),
        ("rollout: {group_size: 1}", None, r"group_size = 1: .*use at least 2"),
        ("train: {row_length: 8}", None, r"row_length = 8 cannot hold .*23 tokens"),
        ("rollout: {max_new_tokens: 60}", None, r"16 \+ .*60 = 76 exceeds model.max_context 64"),
        ("data: {sources: []}", None, r"data in .*: sources is empty"),
        ("data: {sources: [{name: a, kind: sorting, path: x}]}", None, r"path 'x' is not a key of kind sorting, which"),
        (
            "data: {sources: [{name: a, kind: programs, reward: exact}]}",
            None,
            r"reward exact reads texts; programs are run, by reward code or",
        ),
        (
            "data: {sources: [{name: a, kind: jsonl, path: x, fields: {solution: s}}]}",
            None,
            r"with reward exact the answer is the right completion; leave it out",
        ),
        ("data: {sources: [{name: a, kind: jsonl}]}", None, r"path is missing, which a source of kind jsonl needs"),
        ("data: {sources: [{name: a, kind: csv}]}", None, r"data.sources.0.kind = 'csv' in "),
        ("data: {sources: [{name: a/b, kind: sorting}]}", None, r"data.sources.0.name = 'a/b' in .*pattern"),
        (
            "data: {sources: [{name: a, kind: sorting, lo: 3}]}",
            None,
            r"'data.sources.0.lo' .*mean data.sources\[\].low",
        ),
        ("data: {sources: [{name: a, kind: sorting, low: 3, high: 2}]}", None, r"low = 3 is above high = 2"),
        ("data: {sources: [{name: a, kind: sorting}, {name: a, kind: copying}]}", None, r"two sources are named 'a'"),
        ("data: {sources: [{name: a, kind: sorting, template: x}]}", None, r"template 'x' must hold {prompt} once"),
        ("data: {sources: [{name: a, kind: copying, alphabet: aa}]}", None, r"alphabet 'aa' names a letter twice"),
        (
            "data: {sources: [{name: a, kind: jsonl, path: x, heldout: 1, heldout_path: y}]}",
            None,
            r"held-out rows have a place of their own",
        ),
        ("data: {sources: [{name: a, kind: sorting}]}", "data.sources.b.low=1", r"the list has no 'b'; it has a"),
        ("data: {sources: [{name: a, kind: sorting}]}", "data.sources.a=1", r"name a key of 'a' too"),
        (
            "data: {sources: [{name: a, kind: sorting, system_prompt: Be brief.}]}",
            None,
            r"data.sources.a.system_prompt is set, but tokenizer.chat_template = none",
        ),
        ("data: {curriculum: {band: easy}}", None, r"band needs pass_rates; make them with `jaxrl passrate`"),
        ("data: {curriculum: {pass_rates: x}}", None, r"pass_rates are given, but order, band and .* do not use them"),
        ("data: {curriculum: {pass_rates: x, band: [.5, .2]}}", None, r"band \[0.5, 0.2\] is not an interval"),
        ("model: {heads: 4, kv_heads: 3}", None, r"heads 4 is not a multiple of kv_heads 3"),
        ("lora: {rank: 2}", "optimizer.kind=muon", r"muon .*with lora.rank 2 none is trained; use adamw"),
        ("- a\n- b", None, r"holds a list, not sections"),
        ("a: [", None, r"not valid YAML"),
        (
            "seed: 1\ntrain: {steps: 1}\nseed: 2",
            None,
            r"run.yaml: key 'seed' stands twice in one section, line 1; keep one",
        ),
        ("{}", "train.mesh={fsdp: 1, fsdp: 2}", r"train.mesh=.*: key 'fsdp' stands twice in one section"),
        ("extends: 3", None, r"extends is 3"),
        ("extends: run.yaml", None, r"extends itself"),
        ("{}", "optimizer.lr", r"not of the form"),
        ("{}", "train.mesh={data:2}", r"'data:2' is one word to YAML; put a space after the colon"),
        ("{}", "seed.x=1", r"unknown key|valid integer"),
        ("seed: 1", "seed.x=1", r"'seed' is a value, not a section"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, text, override, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=message) as error:
        load(path, [override] if override else [])
    assert "\n" not in str(error.value)


def test_missing_file_names_its_neighbours(tmp_path):
    write(tmp_path, "{}", "quickstart.yaml")
    with pytest.raises(UserError, match=r"quickstrat.yaml does not exist; .* has quickstart.yaml"):
        load(tmp_path / "quickstrat.yaml")


def test_extends_merges_sections_and_the_child_wins(tmp_path):
    write(tmp_path, "optimizer: {lr: 1, b1: 0.5}\nseed: 3", "base.yaml")
    config = load(write(tmp_path, "extends: base.yaml\noptimizer: {lr: 2}"), ["seed=4"])
    assert (config.optimizer.lr, config.optimizer.b1, config.seed) == (2, 0.5, 4)


def test_the_command_line_may_put_another_file_under_a_config(tmp_path):
    write(tmp_path, "algorithm: {ratio_cap: 4}", "one.yaml")
    write(tmp_path, "algorithm: {objective: ppo, clip_high: 0.28}", "other.yaml")
    path = write(tmp_path, "extends: one.yaml\noptimizer: {lr: 2}")
    config = load(path, ["extends=other.yaml", "algorithm.clip_low=0.1"])
    assert (config.optimizer.lr, config.algorithm.constants) == (2, {"clip_low": 0.1, "clip_high": 0.28})
    assert load(write(tmp_path, "{}"), ["extends=one.yaml"]).algorithm.ratio_cap == 4
    with pytest.raises(UserError, match=r"nowhere.yaml does not exist"):
        load(path, ["extends=nowhere.yaml"])


def test_an_objective_brings_its_own_constants(tmp_path):
    config = load(write(tmp_path, "algorithm: {objective: gspo, aggregation: sample, ratio_cap: null}"))
    assert config.algorithm.constants == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert (config.algorithm.ratio_cap, config.algorithm.dual_clip) == (None, None)
    assert validate(yaml.safe_load(dump(config)), "dump") == config


def test_constants_of_corrections_are_numbers_switches_or_names(tmp_path):
    text = "algorithm: {objective: ppo, importance: {tis: {cap: 1e1}, off_policy_mask: {delta: 1, anchor: old}}}"
    config = load(write(tmp_path, text), ["algorithm.importance.mis={weighted: false}"])
    assert config.algorithm.importance == {
        "tis": {"cap": 10.0},
        "off_policy_mask": {"delta": 1.0, "anchor": "old"},
        "mis": {"weighted": False},
    }
    assert differences(config, load(write(tmp_path, text))) == [
        f"algorithm.importance: {config.algorithm.importance} -> "
        "{'tis': {'cap': 10.0}, 'off_policy_mask': {'delta': 1.0, 'anchor': 'old'}}"
    ]


def test_sources_take_the_defaults_of_their_kind_and_overrides_by_name_or_number(tmp_path):
    text = "data: {sources: [{name: sums, kind: arithmetic, high: 20}, {name: letters, kind: copying}]}"
    config = load(write(tmp_path, text), ["data.sources.sums.low=2", "data.sources.1.alphabet=xyz"])
    sums, letters = config.data.sources
    assert (sums.task, sums.low, sums.high, sums.alphabet) == ("addition", 2, 20, None)
    assert (letters.alphabet, letters.longest, letters.low) == ("xyz", 8, None)
    assert validate(yaml.safe_load(dump(config)), "dump") == config
    assert differences(config, load(write(tmp_path, text), ["data.sources.1.alphabet=xyz"])) == [
        "data.sources.sums.low: 2 -> 10"
    ]
    assert load(write(tmp_path, "{}")).data.sources[0].name == "addition"


def test_types_are_named_as_people_read_them():
    kinds = {name: kind for name, kind, *_ in describe()}
    assert kinds["algorithm.anchor"] == "sampler | old | null"
    assert kinds["algorithm.ratio_cap"] == "float | null"
    assert kinds["algorithm.kl.place"] == "none | loss | reward"
    assert kinds["train.mesh"] == "dict"


def test_every_key_is_explained():
    keys = describe()
    assert {"optimizer.lr", "rollout.max_lag", "seed"} <= {name for name, *_ in keys}
    assert [name for name, _, _, text in keys if not text] == []


def test_differences_name_the_keys():
    one = RunConfig()
    other = validate({"optimizer": {"lr": 1.0}, "train": {"mesh": {"data": 2}}}, "test")
    assert [d.split(":")[0] for d in differences(one, other)] == ["optimizer.lr", "train.mesh"]
