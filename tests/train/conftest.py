import functools

import jax
import numpy as np
import pytest
from tiny_policy import ADAMW, GRADIENT, MODEL, OBJECTIVE

from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.state import state_from_params
from jaxrl_llm.train.step import make_train_step


@pytest.fixture(scope="session")
def host_params():
    return jax.tree.map(np.asarray, init_params(MODEL, seed=3))


@pytest.fixture(scope="session")
def build_step():
    """`build(axes, optimizer) -> (step, new_state)`, one compilation per mesh, optimizer and batch shape."""

    @functools.cache
    def build(axes, optimizer):
        sizes = dict(axes)
        mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
        step = make_train_step(MODEL, optimizer, OBJECTIVE, mesh=mesh, temperature=0.7, head_chunk=48, remat=False)
        return step, functools.partial(state_from_params, MODEL, optimizer, mesh=mesh)

    return build


@pytest.fixture(scope="session")
def adamw(build_step, host_params):
    """(step, new_state) on one device with AdamW."""
    step, new_state = build_step((("data", 1),), ADAMW)
    return step, lambda: new_state(params=host_params)


@pytest.fixture(scope="session")
def gradient_of(build_step, host_params):
    """`gradient_of(batch) -> (host gradient tree, metrics)` on one device."""
    step, new_state = build_step((("data", 1),), GRADIENT)

    def gradient(batch):
        state, metrics = step(new_state(params=host_params), batch)
        return jax.tree.map(lambda old, new: old - np.asarray(new), host_params, state.params), metrics

    return gradient
