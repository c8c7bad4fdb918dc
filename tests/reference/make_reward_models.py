"""Tiny random reward models of every dense family as transformers scores them: tests/data/reward_models.npz and .json.

The weights are drawn as in make_families.py, so that only configurations and scores are stored. Run from the
repository's root; README.md in this folder says in which environment.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_families import FAMILIES, SHAPE

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "checkpoints"))
from families import hf_weights  # noqa: E402
from reward_models import NAMES, PAD, TEXTS  # noqa: E402


def main() -> None:
    told, arrays = {}, {}
    for seed, name in enumerate(NAMES):
        kind, fields = FAMILIES[name]
        config = getattr(transformers, kind)(
            **copy.deepcopy({**SHAPE, **fields}), num_labels=1, pad_token_id=PAD, architectures=None
        )
        model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
        model = model.eval().float()
        drawn = hf_weights({key: tuple(value.shape) for key, value in model.state_dict().items()}, seed)
        model.load_state_dict({key: torch.from_numpy(value) for key, value in drawn.items()})
        longest = max(map(len, TEXTS))
        ids = torch.tensor([[*text, *[PAD] * (longest - len(text))] for text in TEXTS])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in TEXTS])
        with torch.no_grad():
            scores = model(ids, attention_mask=mask).logits[:, 0].numpy()
            alone = np.array([model(torch.tensor([text])).logits[0, 0].item() for text in TEXTS], np.float32)
        print(f"{name}: {scores}, batched against alone {np.abs(scores - alone).max():.1e}")
        arrays[name] = alone
        config.architectures = [type(model).__name__]
        told[name] = {"seed": seed, "config": json.loads(config.to_json_string())}
    data = ROOT / "tests" / "data"
    np.savez_compressed(data / "reward_models.npz", **arrays)
    (data / "reward_models.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
