"""What `jaxrl aot` does and says, with CPU devices where a topology's would be; test_topologies.py has real ones."""

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

from jaxrl_llm import aot
from jaxrl_llm.cli import aot as cli_aot
from jaxrl_llm.cli.aot import compile_for
from jaxrl_llm.cli.main import main
from jaxrl_llm.config import ModelConfig, load
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.sampler.loading import WeightLoader
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.types import UserError

CONFIG = """
device: {platform: cpu, cpu_devices: 8}
model: {layers: 1, d_model: 8, heads: 2, kv_heads: 2, head_dim: 4, d_ff: 8, max_context: 12}
tokenizer: {vocab_size: 32}
data: {sources: [{name: addition, kind: arithmetic, low: 1, high: 9, heldout: 16}]}
algorithm: {objective: reinforce, kl: {place: loss, reference_dtype: bfloat16}}
rollout: {prompts_per_step: 2, group_size: 4, max_prompt_tokens: 4, max_new_tokens: 3}
sampler: {slots: 8, decode_steps: 2, mesh: {tensor: 2}}
eval: {prompts: 16}
train: {row_length: 32, microbatch_rows: 2, mesh: {fsdp: 2}}
"""
CPUS = aot.Topology("two by two", [], None, {})


def test_both_programs_of_a_run_compile_from_shapes_alone(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    for name, value in aot.TPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(aot, "topology", lambda name: aot.Topology(name, jax.devices()[:4], None, {}))
    train, decode = compile_for(load(path), "two by two")
    assert (train.name, decode.name) == ("train step", "decode step")
    state, _, reference, _ = train.compiled.input_shardings[0]
    assert jax.tree.structure(reference) == jax.tree.structure(state.params)
    for program, devices in ((train, jax.devices()[:2]), (decode, jax.devices()[2:4])):
        places = jax.tree.leaves(program.compiled.input_shardings[0])
        assert {device for place in places for device in place.device_set} == set(devices)
    for program in (train, decode):
        assert 0 < program.argument_bytes < program.peak_bytes


def test_the_command_says_seconds_and_gib(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    program = aot.Program("train step", 61.23, 2**29, 3 * 2**30, None)
    monkeypatch.setattr(cli_aot, "compile_for", lambda config, topology: [program])
    command = ["jaxrl", "aot", str(tmp_path / "run.yaml"), "--topology", "v5e:2x2", "train.row_length=64"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = "train step for v5e:2x2: compiled in 61.2 s; on each device arguments 0.500 GiB, peak 3.000 GiB\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(("unstack", "int8"), [(False, False), (True, False), (False, True), (True, True)])
def test_abstract_weights_are_those_that_the_engine_loads(unstack, int8):
    model = ModelConfig(layers=2, d_model=8, heads=2, kv_heads=2, head_dim=4, d_ff=8)
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    loader = WeightLoader(model, mesh, dtype="bfloat16", int8=int8, unstack=unstack)
    loaded, abstract = loader.load(init_params(model, 0)), loader.abstract()
    assert jax.tree.structure(abstract) == jax.tree.structure(loaded)
    for one, other in zip(jax.tree.leaves(abstract), jax.tree.leaves(loaded), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, other.ndim)


def test_a_program_beyond_the_devices_memory_is_refused_with_both_figures():
    lowered = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32))
    small = aot.Topology("one board", [], 2**10, {})
    with pytest.raises(
        UserError, match=r"the step does not fit a device of one board: it needs 0\.00G of 0\.00G; less"
    ):
        aot.compile_program("step", lambda: lowered, small, "less")
    assert aot.compile_program("step", lambda: lowered, CPUS, "less").peak_bytes >= 2 * 4 * 16 * 16


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        (
            "RESOURCE_EXHAUSTED: ... required for HLO temporaries (73.05G) exceeds available HBM (15.75G).",
            "73.05G of 15.75G",
        ),
        (
            "E1000: CompileTimeHbmOom: Ran out of memory. Used 48.00G of 15.75G hbm. Exceeded by 32G.",
            "48.00G of 15.75G",
        ),
        ("RESOURCE_EXHAUSTED: in words of the future", "in words of the future"),
    ],
)
def test_the_compilers_own_refusal_becomes_one_message(words, figures):
    def lower():
        raise JaxRuntimeError(words)

    with pytest.raises(UserError, match=f"does not fit a device of two by two: it needs .*{figures}; less$"):
        aot.compile_program("step", lower, CPUS, "less")


def test_what_is_no_matter_of_memory_is_not_hidden():
    def lower(error):
        raise error

    with pytest.raises(JaxRuntimeError, match="INTERNAL"):
        aot.compile_program("step", lambda: lower(JaxRuntimeError("INTERNAL: odd")), CPUS, "")
    with pytest.raises(UserError, match="cannot be compiled for two by two: head dim"):
        aot.compile_program("step", lambda: lower(NotImplementedError("head dim\nmore")), CPUS, "")
    with pytest.raises(UserError, match="needs cuDNN"):
        aot.compile_program("step", lambda: lower(RuntimeError("cuDNN is not detected.")), CPUS, "")


def test_a_topology_that_cannot_be_is_refused_with_the_way_out(monkeypatch):
    for name in ("v5e", "", "h100:", "v5e:2by2", "h100:2x2", "h100:0"):
        with pytest.raises(UserError, match="for example"):
            aot.topology(name)

    def no_compiler(**asked):
        raise RuntimeError("JAX TPU support not installed") if asked["platform"] == "tpu" else NotImplementedError()

    monkeypatch.setattr(aot.topologies, "get_topology_desc", no_compiler)
    for name in ("v5e:2x2", "h100:8"):
        with pytest.raises(UserError, match="`make aot` installs it"):
            aot.topology(name)
