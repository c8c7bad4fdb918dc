"""One batch of documents split, packed and shared in every way: the same loss and the same gradient."""

import itertools

import jax
import numpy as np
import pytest
from tiny_policy import MODEL

from jaxrl_llm.rollout.rows import Document, RowShape, pack

PROMPTS, SIBLINGS, M, B, T = 16, 4, 8, 64, 24
ROWS = {(False, False): 64, (False, True): 16, (True, False): 14, (True, True): 10}  # by (packed, shared)


def groups():
    """Prompts of 2 to 4 tokens with completions of 1 to 4, some of whose tokens are not trained."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(PROMPTS):
        prompt = rng.integers(0, MODEL.vocab_size, rng.integers(2, 5))
        siblings = []
        for n in rng.integers(1, 5, SIBLINGS):
            weights = rng.uniform(0.5, 1.5, n) * (rng.random(n) < 0.9) / (PROMPTS * SIBLINGS)
            behaviour = -3.0 + 0.3 * rng.normal(size=n)
            completion = rng.integers(0, MODEL.vocab_size, n)
            siblings.append(Document(prompt, completion, weights, rng.normal(size=n), behaviour))
        made.append(siblings)
    return made


def batch(microbatches, packed, shared):
    """The documents' rows, dealt evenly over the first `microbatches` of M.

    Packed as a run packs them; else every document, or every group that shares its prompt, has a row of its own.
    """
    documents = [document for group in groups() for document in group]
    together = [documents] if packed else groups() if shared else [[document] for document in documents]
    parts = [pack(each, RowShape(1, B, T, share_prompts=shared)) for each in together]
    used = [int(np.count_nonzero(part.segment_ids.any(axis=-1))) for part in parts]
    rows = sum(used)
    assert rows >= microbatches
    places = np.concatenate([index * B + np.arange(-(-rows // microbatches)) for index in range(microbatches)])[:rows]

    def dealt(*fields):
        found = np.zeros((M * B, T), fields[0].dtype)
        found[places] = np.concatenate([field[0, :n] for field, n in zip(fields, used, strict=True)])
        return found.reshape(M, B, T)

    whole = jax.tree.map(dealt, *(part.replace(microbatches=None) for part in parts))
    return whole.replace(microbatches=np.asarray(microbatches, np.int32)), rows


@pytest.fixture(scope="module")
def plain(gradient_of):
    return gradient_of(batch(1, packed=False, shared=False)[0])


@pytest.mark.parametrize(
    ("microbatches", "packed", "shared"), list(itertools.product((1, 2, 4, 8), (False, True), (False, True)))[1:]
)
def test_microbatches_packing_and_shared_prompts_change_neither_loss_nor_gradient(
    microbatches, packed, shared, gradient_of, plain
):
    split, rows = batch(microbatches, packed, shared)
    assert rows == ROWS[packed, shared]
    gradient, metrics = gradient_of(split)
    np.testing.assert_allclose(metrics["loss"], plain[1]["loss"], rtol=0, atol=1e-6)
    for (path, got), wanted in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(plain[0]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6, err_msg=jax.tree_util.keystr(path))
        assert np.abs(wanted).max() > 1e-3
    assert float(metrics["tokens_trained"]) == float(plain[1]["tokens_trained"]) > 120
