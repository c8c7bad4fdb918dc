"""Log-probabilities of whole texts by the trainer's forward and head, and a text that no model has been trained on."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.packing import first_fit
from jaxrl_llm.losses.logprobs import token_logprobs
from jaxrl_llm.models.transformer import forward, head_weight

PARAGRAPH = (
    "On the morning of the harvest fair, the miller's daughter found that the small bridge had lost three of its "
    "planks during the night. She counted 14 boards in the shed, chose the four that were straight, and carried them "
    "down to the stream before breakfast. Two would have been enough if the water had been lower, but the spring rain "
    "had not stopped for nine days. By noon the carts from the valley could cross again, and nobody asked who had done "
    "the work. In the evening she wrote one line in her notebook: a bridge that holds is a bridge that nobody notices."
)


def document_logprobs(config, params, documents, *, length):
    """float32 [T - 1] for each document of T ids: of every token but the first, given those before it."""
    places = first_fit([len(ids) for ids in documents], length)
    rows = max(row for row, _ in places) + 1
    tokens, targets, positions, segments = (np.zeros((rows, length), np.int32) for _ in range(4))
    for number, (ids, (row, start)) in enumerate(zip(documents, places, strict=True), 1):
        part = slice(start, start + len(ids))
        tokens[row, part], positions[row, part], segments[row, part] = ids, range(len(ids)), number
        targets[row, start : start + len(ids) - 1] = ids[1:]

    @jax.jit
    def compute(params, tokens, targets, positions, segments):
        hidden = forward(config, params, tokens[None], positions[None], segments[None])[0]
        return token_logprobs(hidden, head_weight(params), targets, temperature=1.0, chunk=128)[0]

    found = np.stack(
        [compute(params, *map(jnp.asarray, row)) for row in zip(tokens, targets, positions, segments, strict=True)]
    )
    return [found[row, start : start + len(ids) - 1] for ids, (row, start) in zip(documents, places, strict=True)]
