"""A reward model of a few thousand weights with a tokenizer of its own, which spells what the policy writes."""

import json

import numpy as np
from safetensors.numpy import save_file

# The policy's tokenizer has none of these ids, and may put two digits in one token.
NAMES = ["<unk>", "<s>", "</s>", "<u>", "<a>"]
LETTERS = list("=9876543210+ \u2047")  # the last is how the policy's tokenizer spells its unknown token
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}{% endfor %}</s>"
)
CONFIG = {
    "architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 20, "rms_norm_eps": 1e-5, "max_position_embeddings": 40, "rope_theta": 100.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "pad_token_id": 2, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
}  # fmt: skip


def reward_ids(prompt, completion):
    """The ids of a conversation, spelt out by hand."""
    ids = {name: i for i, name in enumerate([*NAMES, *LETTERS])}
    return [ids[piece] for piece in ("<s>", "<u>", *prompt, "<a>", *completion, "</s>")]


def write_reward_model(path, letters=tuple(LETTERS)):
    from jaxrl_llm.checkpoints.hf_config import from_hf_config
    from jaxrl_llm.checkpoints.hf_reward import reward_tensors

    path.mkdir()
    known = {key: value for key, value in CONFIG.items() if key not in ("id2label", "label2id")}
    model = from_hf_config(known).model_copy(update={"tie_embeddings": True})
    rng = np.random.default_rng(0)
    save_file(
        {t.name: rng.standard_normal(t.shape, np.float32) for t in reward_tensors(model)}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(CONFIG))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocab = {name: i for i, name in enumerate([*NAMES, *letters])}
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "decoder": {"type": "Fuse"},
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in enumerate(NAMES)],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(spec))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
