"""Folders that we write are read by transformers, with exactly the logits it computes from the folders we read.

Not in the ordinary suite; see README.md in this folder.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params, write_hf
from jaxrl_llm.checkpoints.hf_config import to_hf_config

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
from families import DATA, DOCUMENTS, TOKENS, configs, write_folder

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default"),  # other people's imports
]


def logits(path):
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return [model.eval()(torch.tensor([tokens])).logits[0].numpy() for tokens in TOKENS]


@pytest.mark.parametrize("name", configs())
def test_transformers_computes_the_same_from_what_we_write(name, tmp_path):
    write_folder(tmp_path / "in", name, layout="saved")
    folder = open_hf(tmp_path / "in")
    write_hf(tmp_path / "out", folder.model, read_hf_params(folder), to_hf_config(folder.model), shard_bytes=40_000)
    with np.load(DATA / "families.npz") as stored:
        wanted = [stored[f"{name}.{document}"] for document in DOCUMENTS]
    for before, after, reference in zip(logits(tmp_path / "in"), logits(tmp_path / "out"), wanted, strict=True):
        np.testing.assert_array_equal(after, before)
        np.testing.assert_allclose(after, reference, atol=1e-5)
