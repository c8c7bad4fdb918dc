"""A tiny adapter as PEFT saves it, and the logits that PEFT computes with it: tests/data/peft.

Its base is the model `qwen3` of make_families.py. Run from the repository's root; README.md in this folder says in
which environment.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "checkpoints"))
from families import DOCUMENTS, TOKENS, write_folder  # noqa: E402

BASE = "qwen3"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / BASE
        write_folder(folder, BASE, layout="saved")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(0)
    how = LoraConfig(r=3, lora_alpha=4, target_modules=MODULES, use_rslora=True, lora_dropout=0.1)
    adapted = get_peft_model(model, how).eval()
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:  # zero at first, which would prove nothing
                value.copy_(0.2 * torch.randn_like(value))
        logits = {d: adapted(torch.tensor([t])).logits[0].numpy() for d, t in zip(DOCUMENTS, TOKENS, strict=True)}
    data = ROOT / "tests" / "data" / "peft"
    shutil.rmtree(data, ignore_errors=True)
    adapted.save_pretrained(data, save_embedding_layers=False)
    (data / "README.md").unlink()
    (data / "adapter_model.safetensors").chmod(0o644)
    told = json.loads((data / "adapter_config.json").read_text()) | {
        "base_model_name_or_path": None
    }  # a scratch folder
    (data / "adapter_config.json").write_text(json.dumps(told, indent=1) + "\n")
    np.savez_compressed(data / "logits.npz", **logits)


if __name__ == "__main__":
    main()
