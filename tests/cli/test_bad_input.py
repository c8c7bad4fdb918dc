"""Bad input: one line that names the value, the place and the way out; exit status 2; no traceback."""

import pytest

from jaxrl_llm.aot import TPU_ENVIRONMENT

_SIX_HEADS = ("model.heads=6", "model.kv_heads=3", "model.head_dim=8")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lrr=1"], "unknown key 'optimizer.lrr'"),
        (["train.steps=many"], "train.steps = 'many'"),
        (["rollout.group_size=1"], "group"),
        (["rollout.length_limit=10"], "rollout.length_cache = 4096 exceeds"),
        (["rollout.max_prompt_tokens=3"], "has 4 tokens, more than rollout.max_prompt_tokens = 3"),
        (["rollout.max_new_tokens=2"], "needs 3 tokens with its end, more than rollout.max_new_tokens = 2"),
        (["model.max_context=6"], "exceeds model.max_context 6"),
        (
            ["train.mesh={tensor: 2}", "model.kv_heads=1"],
            "train.mesh: layers.k: kv_heads 1 does not divide over tensor 2; use a multiple of 2",
        ),
        (["train.mesh={tensor: 3}", *_SIX_HEADS], "train.mesh: embed: vocab_size 14 does not divide over tensor 3"),
        (["train.mesh={tensor: 2}", "model.d_ff=63"], "train.mesh: layers.down: d_ff 63 does not divide over tensor 2"),
        (["train.mesh={fsdp: 2}", "model.d_model=33"], "train.mesh: embed: d_model 33 does not divide over fsdp 2"),
        (
            ["train.mesh={expert: 2}", "model.experts=3", "model.experts_per_token=1", "model.router_gate=softmax"],
            "train.mesh: layers.expert_down: experts 3 does not divide over expert 2",
        ),
        (["train.mesh={data: 3}"], "train.microbatch_rows: batch 2 does not divide over data 3"),
        (["train.mesh={data: 2, expert: 2}"], "batch 2 does not divide over data 2 x expert 2"),
        (["train.mesh={context: 3}"], "train.row_length: time 32 does not divide over context 3; use a multiple of 3"),
        (["train.mesh={data: 8}"], "needs 8 devices and sampler.mesh (data 1 x tensor 1) 1, but there are 8"),
        (["train.mesh={context: 16}"], "needs 16 devices"),
        (["train.mesh={context: -1, tensor: -1}"], "more than one axis of size -1"),
        (["train.mesh={context: 0}"], "axis context the size 0"),
        (["train.mesh={fsdp: 2, fsdp: 4}"], "key 'fsdp' stands twice in one section"),
        (["train.mesh={experts: 2}"], "unknown axes ['experts']"),
        (["sampler.mesh={tensor: 4}"], "sampler.mesh: heads 2 does not divide over tensor 4"),
        (["sampler.mesh={tensor: 3}", *_SIX_HEADS], "sampler.mesh: embed: vocab_size 14 does not divide over tensor 3"),
        (["sampler.mesh={context: 2}"], "sampler.mesh has context 2, but only the trainer splits the tokens of a row"),
        (["sampler.mesh={data: 3}"], "sampler.slots 8 does not divide over data 3"),
        (["model.init=nowhere.gguf", "tokenizer.kind=gguf"], "nowhere.gguf"),
        (["tokenizer.kind=gguf"], "model.init, which is not set"),
        (["tokenizer.path=nowhere.model"], "nowhere.model"),
        (["tokenizer.kind=hf"], "tokenizer.path, which is not set"),
        (
            ["tokenizer.kind=hf", "tokenizer.path=nowhere"],
            "'nowhere' does not exist; give a folder with a tokenizer.json",
        ),
        (["tokenizer.kind=hf", "tokenizer.path=tests/text/hf_families.py"], "is not a tokenizer.json"),
        (["data.sources.0.high=4"], "data.sources.addition: heldout = 16 of the 16 problems that there are leaves"),
        (["data.sources.0.task=sums"], "data.sources.addition: arithmetic task 'sums' is not known; give one of"),
        (["eval.prompts=17"], "eval.prompts = 17 exceeds the 16 held-out prompts that there are; lower it"),
        (["data.sources.0.weight=0"], "data.sources.0.weight = 0"),
        (["tokenizer.kind=bpe"], "tokenizer.kind = 'bpe'"),
        (["tokenizer.vocab_size=9"], "tokenizer.vocab_size 9"),
        (["tokenizer.chat_template=chatml"], "no special token"),
        (["model.vocab_size=33"], "model.vocab_size = 33"),
        (["model.attention=splash"], "model.attention = splash: it is a kernel for TPU, the trainer's devices are cpu"),
        (["model.attention=cudnn"], "model.attention = cudnn: it is a kernel for GPU"),
    ],
)
def test_bad_values(tiny, jaxrl, overrides, message):
    status, _, err = jaxrl("train", tiny, *overrides, "--run-dir", tiny.parent / "run")
    assert status == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not list((tiny.parent / "run").glob("*.jsonl"))  # nothing was begun


def test_missing_config_names_the_neighbours(tiny, jaxrl):
    status, _, err = jaxrl("train", tiny.with_name("tyni.yaml"))
    assert (status, err.count("\n")) == (2, 1)
    assert "tyni.yaml does not exist" in err
    assert "tiny.yaml" in err


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model" * 100])
def test_corrupt_gguf(tiny, jaxrl, content):
    path = tiny.parent / "broken.gguf"
    path.write_bytes(content)
    status, _, err = jaxrl("train", tiny, f"model.init={path}", "tokenizer.kind=gguf", "--run-dir", tiny.parent / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "broken.gguf" in err


@pytest.mark.parametrize("command", ["summary", "report", "fit"])
def test_commands_on_what_is_no_run(tmp_path, jaxrl, command):
    status, _, err = jaxrl(command, tmp_path / "no-run")
    assert (status, err.count("\n")) == (2, 1)
    assert "no-run" in err


def test_help_and_config_show_explain_every_key_from_one_source(tiny, jaxrl):
    from jaxrl_llm.config import describe

    _, help_text, _ = jaxrl("train", "--help")
    status, shown, _ = jaxrl("config", "show", tiny, "optimizer.lr=1e-6")
    assert status == 0
    for name, _, _, text in describe():
        assert f"{name} (" in help_text
        assert text in shown
    assert "* optimizer.lr = 1e-06" in shown


def test_a_run_directory_that_is_a_file(tiny, jaxrl):
    status, _, err = jaxrl("train", tiny, "--run-dir", tiny)
    assert (status, err.count("\n")) == (2, 1)
    assert "tiny.yaml cannot be used" in err


def test_a_topology_that_is_none(tiny, jaxrl, monkeypatch):
    for name in TPU_ENVIRONMENT:  # what the command sets, put back afterwards
        monkeypatch.setenv(name, "1")
    status, _, err = jaxrl("aot", tiny, "--topology", "v5e")
    assert (status, err.count("\n")) == (2, 1)
    assert "topology 'v5e' is not of the form KIND:SHAPE" in err
