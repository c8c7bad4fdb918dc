"""Adapters that we write are read by PEFT, with the logits that we compute from them; every family of make_families.py.

Not in the ordinary suite; see README.md in this folder.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpoints.hf import open_hf, read_hf_params
from jaxrl_llm.checkpoints.peft import read_peft, write_peft
from jaxrl_llm.config import LoraConfig
from jaxrl_llm.losses.logprobs import project_f32, soft_cap
from jaxrl_llm.models.lora import attach, trainable
from jaxrl_llm.models.transformer import forward, head_weight

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
from families import TOKENS, configs, write_folder

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default"),  # other people's imports
]


def theirs(base, adapter):
    import torch
    import transformers
    from peft import PeftModel

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    loaded = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    with torch.no_grad():
        return [adapted(torch.tensor([tokens])).logits[0].numpy() for tokens in TOKENS], loaded


# transformers works dynamic scaling out of each sequence's length, we of the model's context.
@pytest.mark.parametrize("name", [name for name in configs() if name != "llama_dynamic"])
def test_peft_computes_the_same_from_what_we_write(name, tmp_path):
    write_folder(tmp_path / "base", name, layout="saved")
    folder = open_hf(tmp_path / "base")
    model = folder.model
    targets = LoraConfig().targets if model.experts is None else ("q", "k", "v", "o")
    lora = LoraConfig(rank=3, alpha=4.5, targets=targets, rslora=name == "qwen3")
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape, np.float32), trainable(model, lora)[0])
    write_peft(tmp_path / "adapter", model, lora, adapters, base=None)
    again, read = read_peft(tmp_path / "adapter", model)
    assert again.scale == lora.scale
    jax.tree.map(np.testing.assert_array_equal, read, adapters)

    params = jax.tree.map(jnp.asarray, attach(read_hf_params(folder), adapters, lora))
    wanted, loaded = theirs(tmp_path / "base", tmp_path / "adapter")
    assert len(loaded) == 2 * len(targets) * model.layers
    for tokens, want in zip(TOKENS, wanted, strict=True):
        row = np.array([tokens], np.int32)
        hidden = forward(model, params, row, np.arange(len(tokens), dtype=np.int32)[None], np.ones_like(row))[0]
        ours = soft_cap(project_f32(hidden, head_weight(params)), model.final_softcap)
        # Gemma 2's logits differ from transformers' by up to 1.3e-5 without any adapter.
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=3e-5 if name == "gemma2" else 1e-5)
