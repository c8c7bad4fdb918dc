"""`hub:OWNER/NAME[@REVISION]` with the real client, against a server here with the Hub's endpoints."""

import json
import sys

import jax
import numpy as np
import pytest
from hub_server import Hub
from safetensors.numpy import load_file, save
from tiny_reward import LETTERS, NAMES, write_reward_model

from jaxrl_llm.checkpoints.hf_config import to_hf_config
from jaxrl_llm.checkpoints.hf_tensors import hf_tensors
from jaxrl_llm.checkpoints.hub import hub_snapshot
from jaxrl_llm.checkpoints.peft import write_peft
from jaxrl_llm.cli.adapters import starting_params
from jaxrl_llm.cli.assemble import assemble, initial_params
from jaxrl_llm.cli.reward import open_reward_model
from jaxrl_llm.cli.run_dir import claim
from jaxrl_llm.config import LoraConfig, ModelConfig, load
from jaxrl_llm.models.lora import trainable
from jaxrl_llm.types import UserError

MODEL = ModelConfig(layers=2, d_model=32, heads=2, kv_heads=2, head_dim=16, d_ff=64, vocab_size=40, max_context=12)


def repository(folder, seed):
    """Weights of MODEL, the tokenizer of a reward model, and what must not be fetched."""
    rng = np.random.default_rng(seed)
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    weights = save({t.name: rng.standard_normal(t.shape, np.float32) for t in hf_tensors(MODEL)})
    return files | {
        "config.json": json.dumps(to_hf_config(MODEL) | {"eos_token_id": 2}).encode(),
        "model.safetensors": weights,
        "pytorch_model.bin": b"a pickle",
        "modeling_tiny.py": b"raise RuntimeError",
        "adapter_model.safetensors": b"other weights",
        "model-fp8/model.safetensors": b"other weights",
        "README.md": b"words",
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    write_reward_model(tmp_path / "judge")
    server = Hub()
    server.repos["me/tiny"] = {"main": repository(tmp_path / "judge", 0), "v1": repository(tmp_path / "judge", 1)}
    judge = {path.name: path.read_bytes() for path in (tmp_path / "judge").iterdir()}
    server.repos["me/judge"] = {"main": judge}
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # The client reads its settings once, when it is imported.
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)
    yield server
    server.stop()
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]


def test_only_what_is_read_is_fetched_and_fetched_once(hub, tmp_path):
    folder = hub_snapshot("hub:me/tiny@v1")
    assert folder.name == hub.commit("me/tiny", "v1")[0]
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.rglob("*")} == wanted
    fetched = [path for path in hub.asked if "/resolve/" in path]
    assert {path.rpartition("/")[2] for path in fetched} == wanted
    assert hub_snapshot("hub:me/tiny@v1") == folder
    assert [path for path in hub.asked if "/resolve/" in path] == fetched
    main = hub_snapshot("hub:me/tiny", weights=False)
    assert main != folder
    assert {path.name for path in main.iterdir()} == wanted - {"model.safetensors"}


def test_every_command_takes_a_name_of_the_hub(hub, tmp_path, tiny, jaxrl):
    status, out, err = jaxrl("inspect", "hub:me/tiny")
    assert status == 0, err
    assert "model.embed_tokens.weight  F32  40x32  5120  " in out
    status, _, err = jaxrl("convert", "hub:me/tiny@v1", tmp_path / "out")
    assert status == 0, err
    (tmp_path / "v1.safetensors").write_bytes(hub.repos["me/tiny"]["v1"]["model.safetensors"])
    wanted, found = load_file(tmp_path / "v1.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())
    names = ["model.init=hub:me/tiny@v1", "tokenizer.kind=hf", "tokenizer.path=hub:me/tiny"]
    names += ["rollout.rewards={model: 1}", "rollout.reward_model.path=hub:me/judge"]
    setup = assemble(load(tiny, [*names, "model.layers=2"]))
    np.testing.assert_array_equal(initial_params(setup)["embed"], wanted["model.embed_tokens.weight"])
    assert setup.tokenizer.encode(LETTERS[3]) == [len(NAMES) + 3]
    assert open_reward_model(setup).tokenizer.fingerprint == setup.tokenizer.fingerprint
    (tmp_path / "run").mkdir()
    claim(tmp_path / "run", setup)
    commits = json.loads((tmp_path / "run" / "environment.json").read_text())["hub_commits"]
    places = {
        "hub:me/tiny@v1": ("me/tiny", "v1"),
        "hub:me/tiny": ("me/tiny", "main"),
        "hub:me/judge": ("me/judge", "main"),
    }
    assert commits == {name: hub.commit(*place)[0] for name, place in places.items()}


def test_adapters_come_from_the_hub_and_name_their_base_there(hub, tmp_path, tiny, jaxrl):
    lora = LoraConfig(rank=3, targets=("q", "o"))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), trainable(MODEL, lora)[0])
    write_peft(tmp_path / "adapter", MODEL, lora, adapters, base="hub:me/tiny@v1")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == ("me/tiny", "v1")
    files = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    hub.repos["me/adapter"] = {"main": files | {"adapter_model.bin": b"a pickle", "config.json": b"{}"}}
    names = ["model.init=hub:me/tiny", "tokenizer.kind=hf", "tokenizer.path=hub:me/tiny", "lora.init=hub:me/adapter"]
    setup = assemble(load(tiny, [*names, "model.layers=2"]))
    assert (setup.config.lora.rank, set(setup.config.lora.targets)) == (3, {"q", "o"})
    jax.tree.map(np.testing.assert_array_equal, starting_params(setup), adapters)
    assert {path.rpartition("/")[2] for path in hub.asked if "me/adapter/resolve" in path} == set(files)
    (tmp_path / "run").mkdir()
    claim(tmp_path / "run", setup)
    commits = json.loads((tmp_path / "run" / "environment.json").read_text())["hub_commits"]
    assert commits["hub:me/adapter"] == hub.commit("me/adapter", "main")[0]
    # An adapter's folder can be looked into like any other.
    status, out, err = jaxrl("inspect", tmp_path / "adapter")
    assert status == 0, err
    assert "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight  F32  32x3  384  " in out
    assert "8 arrays, 768 numbers" in out
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    status, _, err = jaxrl("inspect", tmp_path / "adapter")
    assert (status, "has no adapter_model.safetensors" in err) == (2, True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hub:me/none", "there is no repository me/none, or it is private"),
        ("hub:me/tiny@v9", "me/tiny has no revision 'v9'"),
        ("hub:me/closed", "is gated: accept its terms"),
        ("hub:tiny", "is not of the form hub:OWNER/NAME"),
        ("hub:me/tiny@", "is not of the form hub:OWNER/NAME"),
        ("hub:", "is not of the form hub:OWNER/NAME"),
        ("hub:me/../x", "is not of the form"),
        ("hub:me/ti ny", "does not name a repository"),
        ("hub:me/words", "'hub:me/words' has no config.json"),
    ],
)
def test_a_name_that_cannot_be_fetched_says_why(hub, jaxrl, source, message):
    hub.gated.add("me/closed")
    hub.repos["me/words"] = {"main": {"tokenizer.json": b"{}"}}
    status, _, err = jaxrl("inspect", source)
    assert (status, err.count("\n")) == (2, 1), err
    assert message in err


def test_without_a_network_the_cache_serves_and_else_the_error_says_so(hub, monkeypatch):
    folder = hub_snapshot("hub:me/tiny")
    hub.stop()
    assert hub_snapshot("hub:me/tiny") == folder
    assert hub_snapshot("hub:me/tiny", offline=True) == folder
    with pytest.raises(UserError, match="the Hub cannot be reached and the cache has no complete copy"):
        hub_snapshot("hub:me/judge")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="the cache has no complete copy"):
        hub_snapshot("hub:me/tiny")
    monkeypatch.setattr(hub, "stop", lambda: None)


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"install it with pip install 'jaxrl_llm\[hub\]'"):
        hub_snapshot("hub:me/tiny")
