"""JetStream where it is installed, the stand-in where it is not; nothing else of the process changes."""

import subprocess
import sys

PROGRAM = """
import logging, sys
logging.getLogger().setLevel(logging.ERROR)
before = set(sys.modules)
import jaxrl_llm
assert "jax" not in set(sys.modules) - before, "import jaxrl_llm must stay light"
if {hide}:
    sys.modules["jetstream"] = None
from jaxrl_llm.sampler import jetstream
assert logging.getLogger().level == logging.ERROR and not logging.getLogger().handlers
assert "seqio" not in sys.modules and "seqio.vocabularies" not in sys.modules
print(jetstream.ENGINE_BASE, jetstream.Engine.__module__)
import jax
from sampler_reference import CONFIG, make_engine, make_params, make_requests, run
from jaxrl_llm.sampler.scheduler import Scheduler
if {sample}:
    engine = make_engine()
    completions = run(Scheduler(engine, make_params(CONFIG, 3)), make_requests(6))
    print([c.tokens_T.tolist() for c in completions])
    result = engine.generate(engine.load_params(make_params(CONFIG, 3)), engine.init_decode_state())[1]
    result.copy_to_host_async()
    print(result.convert_to_numpy().get_result_at_slot(3).tokens.tolist(), engine.get_tokenizer().path == "")
"""


def execute(*, hide, sample):
    program = PROGRAM.format(hide=hide, sample=sample)
    path = {"PYTHONPATH": ":".join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_real_interface_is_the_base_where_it_is_installed():
    assert execute(hide=False, sample=False) == ["google-jetstream 0.2.2 jetstream.engine.engine_api"]


def test_without_jetstream_the_same_class_samples_the_same_tokens(engine, params):
    from sampler_reference import make_requests, run

    from jaxrl_llm.sampler.scheduler import Scheduler

    base, tokens, nothing = execute(hide=True, sample=True)
    assert base == "stand-in jaxrl_llm.sampler.engine_api"
    assert tokens == str([c.tokens_T.tolist() for c in run(Scheduler(engine, params), make_requests(6))])
    assert nothing == "[[0, 0, 0]] True"
