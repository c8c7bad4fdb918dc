import jax
import numpy as np
import pytest
from reference import CONFIG, EOS, TIED, Trainer, make_engine, requests, run, sharpened

from jaxrl_llm.sampler.scheduler import Scheduler


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_logprobs_equal_the_teacher_forced_forward(config):
    # FIELD_BUGS 8, 9: first token (prefill) and later ones (decode), temperatures .5, 1, 2, heads tied and untied
    params = sharpened(config, 3)
    asked = requests(32)
    completions = run(Scheduler(make_engine(config), params), asked)
    expected = Trainer(config)(params, asked, completions)
    for completion, logprobs in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.logprobs_T, logprobs, atol=1e-5)
    lengths = [len(c.tokens_T) for c in completions]
    assert min(lengths) == 1
    assert max(lengths) > 6
    assert np.std(np.concatenate(expected)) > 0.3  # not a flat distribution, where anything would agree
