"""Compiled things are shared: engines and references are pure functions, only schedulers hold state."""

import pytest
from sampler_reference import CONFIG, TIED, MixedReference, Trainer, make_engine, make_params


@pytest.fixture(scope="session")
def engine():
    return make_engine()


@pytest.fixture(scope="session")
def tied_engine():
    return make_engine(TIED)


@pytest.fixture(scope="session")
def trainer():
    return Trainer(CONFIG)


@pytest.fixture(scope="session")
def mixed():
    return MixedReference(CONFIG)


@pytest.fixture(scope="session")
def params():
    return make_params(CONFIG, 3)


@pytest.fixture(scope="session")
def other_params():
    return make_params(CONFIG, 4)
