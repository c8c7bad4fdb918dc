"""Weights on their way to another world: the digest of what a sampler holds is that of what was sent."""

import jax
import numpy as np
import pytest
from sampler_reference import CONFIG, make_engine, make_params

from jaxrl_llm.models.quantised import Int8Weight
from jaxrl_llm.sampler.wire_form import WireForm
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.types import UserError
from jaxrl_llm.weights.snapshot import named, take_snapshot


@pytest.fixture(scope="module")
def trainer_mesh():
    return make_mesh({"fsdp": 2}, jax.devices()[4:6])


@pytest.mark.parametrize(
    ("dtype", "on_the_way", "int8"),
    [("float32", "float32", False), ("bfloat16", "bfloat16", False), ("float32", "bfloat16", False),
     ("bfloat16", "float32", True), ("float32", "float32", True)],
)  # fmt: skip
def test_the_digest_of_the_samplers_weights_is_the_trainers(trainer_mesh, dtype, on_the_way, int8):
    engine = make_engine(dtype=dtype, int8_weights=int8)
    trainer = WireForm(CONFIG, trainer_mesh, dtype=on_the_way, int8=int8)
    sampler = WireForm(CONFIG, engine.mesh, dtype=on_the_way, int8=int8)
    assert trainer.words == sampler.words
    assert trainer.shapes == sampler.shapes
    params = make_params(CONFIG, 3)
    sent = take_snapshot(1, named(trainer.make(params)))
    assert {leaf.path: (leaf.array.shape, leaf.array.dtype.name) for leaf in sent.leaves} == sampler.shapes
    loaded = engine.load_params(sampler.rebuild({leaf.path: leaf.array for leaf in sent.leaves}))
    if dtype == on_the_way or not int8:
        assert take_snapshot(1, sampler.read_back(loaded)).digest == sent.digest
    # ... and they are what the engine makes of the trainer's own.
    if dtype == on_the_way:
        straight = engine.load_params(params)
        jax.tree.map(np.testing.assert_array_equal, loaded, straight)
    if int8:
        matrices = [x for x in jax.tree.leaves(loaded["layers"], is_leaf=_is_int8) if _is_int8(x)]
        assert matrices
        assert sent.nbytes < 0.5 * take_snapshot(1, named(params)).nbytes


def _is_int8(leaf):
    return isinstance(leaf, Int8Weight)


def test_a_digest_sees_one_wrong_number_in_the_samplers_weights(trainer_mesh):
    engine = make_engine()
    wire = WireForm(CONFIG, engine.mesh, dtype="float32", int8=False)
    params = make_params(CONFIG, 3)
    sent = take_snapshot(1, named(wire.make(params)))
    loaded = engine.load_params(params)
    layers = list(loaded["layers"])
    name = next(iter(layers[1]))
    layers[1] = layers[1] | {name: layers[1][name].at[(0,) * layers[1][name].ndim].add(1e-6)}
    assert take_snapshot(1, wire.read_back({**loaded, "layers": tuple(layers)})).digest != sent.digest


def test_quantised_weights_of_another_model_are_refused():
    engine = make_engine(int8_weights=True)
    wire = WireForm(CONFIG, engine.mesh, dtype="float32", int8=True)
    sent = {leaf.path: leaf.array for leaf in take_snapshot(1, named(wire.make(make_params(CONFIG, 3)))).leaves}
    path = next(path for path in sent if path.endswith(".values"))
    tree = wire.rebuild(sent | {path: sent[path][..., :-1]})
    with pytest.raises(UserError, match="has shape"):
        engine.load_params(tree)
