"""A random Llama of a preset inside TRL's GRPOTrainer. Needs trl and torch.

The end and pad ids lie outside what the model samples, so that every completion has its full length.
"""

import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from workload import PRESETS, Work


def trainer_of(work: Work, prompts: list[str], folder: str) -> GRPOTrainer:
    """Float32 on CPU, no gradient checkpointing, no KL; `compute_loss` is GRPO's with clip 0.2."""
    shape = PRESETS[work.preset]
    torch.manual_seed(0)
    ids = {str(i): i for i in range(shape.vocab)} | {"<eos>": shape.vocab, "<pad>": shape.vocab + 1}
    words = Tokenizer(models.WordLevel(ids, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=shape.vocab,
        pad_token_id=None,
    )
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=work.sequences,
        num_generations=work.group,
        max_completion_length=work.new,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_grad_norm=0.0,
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=LlamaForCausalLM(config).float(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )


def as_text(prompts_PT) -> list[str]:
    """One written integer is one token."""
    return [" ".join(map(str, prompt)) for prompt in prompts_PT]
