"""Compiled things are shared: engines and references are pure functions, only schedulers hold state."""

import pytest
from sampler_reference import (
    CONFIG,
    LONG,
    LONG_NEW,
    LONG_PROMPT,
    MARK,
    PHRASE,
    TIED,
    MixedReference,
    Trainer,
    make_engine,
    make_params,
)

from jaxrl_llm.sampler.interruption import Interruption


@pytest.fixture(scope="session")
def engine():
    return make_engine()


@pytest.fixture(scope="session")
def tied_engine():
    return make_engine(TIED)


@pytest.fixture(scope="session")
def long_engine():
    return make_engine(
        LONG,
        slots=8,
        decode_steps=4,
        max_prompt_tokens=LONG_PROMPT,
        max_new_tokens=LONG_NEW,
        prefill_chunk=10,
        prefill_buckets=(4, 10),
        interruption=Interruption(PHRASE, MARK),
        top_logprobs=3,
    )


@pytest.fixture(scope="session")
def long_trainer():
    return Trainer(LONG, length=LONG_PROMPT + LONG_NEW)


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
