import jax
import numpy as np
from tiny_policy import MODEL

from jaxrl_llm.config import LoraConfig, ModelConfig
from jaxrl_llm.models.lora import trainable
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.train.norms import part_norms

KINDS = {"embed", "head", "attention", "mlp", "norms"}
THIRDS = {"first_third", "middle_third", "last_third"}


def drawn(abstract):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), abstract)


def norm(*arrays):
    return np.sqrt(sum((np.asarray(a, np.float64) ** 2).sum() for a in arrays))


def test_kinds_and_thirds_of_a_policy():
    model = ModelConfig(**MODEL.model_dump() | {"layers": 4, "tie_embeddings": False, "qkv_bias": True})
    tree = drawn(abstract_params(model))
    layers, found = tree["layers"], part_norms(tree)
    assert found.keys() == KINDS | THIRDS | {"all"}
    np.testing.assert_allclose(found["all"], norm(*jax.tree.leaves(tree)), rtol=1e-5)
    np.testing.assert_allclose(found["head"], norm(tree["head"]), rtol=1e-5)
    attention = [layers[name] for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias")]
    np.testing.assert_allclose(found["attention"], norm(*attention), rtol=1e-5)
    np.testing.assert_allclose(found["mlp"], norm(layers["gate"], layers["up"], layers["down"]), rtol=1e-5)
    norms = (layers["attn_norm"], layers["mlp_norm"], tree["final_norm"])
    np.testing.assert_allclose(found["norms"], norm(*norms), rtol=1e-5)
    # Of four layers, 3 l / 4 puts the first two into the first third.
    for name, part in {"first_third": [0, 1], "middle_third": [2], "last_third": [3]}.items():
        np.testing.assert_allclose(found[name], norm(*(x[part] for x in jax.tree.leaves(layers))), rtol=1e-5)


def test_every_part_is_counted_once():
    shape = MODEL.model_dump() | {"layers": 3, "experts": 3, "experts_per_token": 1, "router_gate": "softmax"}
    for model in (MODEL, ModelConfig(**shape | {"shared_expert_d_ff": 8})):
        found = part_norms(drawn(abstract_params(model)))
        kinds = norm(*(value for name, value in found.items() if name in KINDS))
        np.testing.assert_allclose(kinds, found["all"], rtol=1e-5)
    assert "first_third" not in part_norms(drawn(abstract_params(MODEL)))  # two layers have no thirds


def test_adapters_are_a_kind_of_their_own():
    tree = drawn(trainable(MODEL.model_copy(update={"layers": 3}), LoraConfig(rank=2))[0])
    found = part_norms(tree)
    assert found.keys() == THIRDS | {"adapters", "all"}
    np.testing.assert_allclose(norm(*(found[name] for name in THIRDS)), found["adapters"], rtol=1e-5)
