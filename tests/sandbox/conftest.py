import pytest

from jaxrl_llm.sandbox.jail import find_jail
from jaxrl_llm.sandbox.languages import LANGUAGES, job
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.sandbox.pool import SandboxPool

# Generous in time, for a busy machine; tight in all else.
LIMITS = Limits(wall_s=20.0, memory_bytes=256 * 2**20, processes=16, output_bytes=2**16, disk_bytes=2**22)


@pytest.fixture(scope="session")
def jail():
    return find_jail()


@pytest.fixture(scope="session")
def pool(jail):
    with SandboxPool(jail, LIMITS, workers=2) as pool:
        yield pool


@pytest.fixture
def run(pool):
    """`run(source, stdin="", language="python") -> Outcome` under LIMITS."""

    def one(source, stdin="", language="python", files=None):
        return pool.submit(job(LANGUAGES[language], source, stdin, files)).result(timeout=60)

    return one
