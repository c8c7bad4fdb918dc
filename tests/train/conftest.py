import functools

import jax
import numpy as np
import pytest
from tiny_policy import ADAMW, CISPO, HEAD_CHUNK, MODEL, OPTIMIZER_CONFIG, TEMPERATURE

from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.state import shardings_of, state_from_params
from jaxrl_llm.train.step import make_train_step


@pytest.fixture(scope="session")
def host_params():
    """Weights uneven enough to matter, drawn in numpy, which has nothing to compile."""
    rng = np.random.default_rng(3)

    def draw(path, x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return 1 + 0.1 * noise if "norm" in jax.tree_util.keystr(path) else 0.18 * noise

    return jax.tree_util.tree_map_with_path(draw, abstract_params(MODEL))


@pytest.fixture(scope="session")
def traces():
    """Grows whenever a step built by `build_step` is traced."""
    return []


@pytest.fixture(scope="session")
def build_step(host_params, traces):
    """`build(axes, remat="none", unroll=1) -> (step, new_state)`, compiled once for each."""

    def counted_objective(*args):
        traces.append(1)
        return CISPO.objective(*args)

    @functools.cache
    def build(axes, remat="none", unroll=1):
        sizes = dict(axes)
        mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
        step = make_train_step(
            MODEL,
            ADAMW,
            Algorithm(counted_objective, token_level=True),
            mesh=mesh,
            temperature=TEMPERATURE,
            head_chunk=HEAD_CHUNK,
            remat=remat,
            unroll=unroll,
        )
        first = state_from_params(MODEL, ADAMW, mesh=mesh, params=host_params)
        shardings, first = shardings_of(first), jax.tree.map(np.asarray, first)

        def new_state():
            # Not state_from_params each time: it compiles the optimizer's init.
            return jax.tree.map(lambda x, s: jax.device_put(x, s, may_alias=False), first, shardings)

        return step, new_state

    return build


@pytest.fixture(scope="session")
def one_device(build_step):
    """(step, new_state) on one device."""
    return build_step((("data", 1),))


@pytest.fixture(scope="session")
def gradient_of(one_device):
    """`gradient_of(batch) -> (host gradient tree, metrics)`, read from Adam's first moment after one step."""
    step, new_state = one_device

    def gradient(batch):
        state, metrics = step(new_state(), batch)
        moment = next(s for s in state.opt_state if hasattr(s, "mu")).mu
        return jax.tree.map(lambda m: np.asarray(m) / (1 - OPTIMIZER_CONFIG.b1), moment), metrics

    return gradient
