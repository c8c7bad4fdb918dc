"""Times TRL's generation (GRPOTrainer's regular path over transformers) on the same work. Needs trl and torch.

The end and pad ids lie outside what the model samples, so that every completion has its full length.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from workload import PRESETS, arguments, report, timed, work_of


def main() -> None:
    work = work_of(arguments(__doc__ or "").parse_args())
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
    rng = np.random.default_rng(0)

    def prompts() -> list[str]:
        return [" ".join(map(str, rng.integers(3, shape.vocab, work.prompt_len))) for _ in range(work.prompts)]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=work.sequences,
            num_generations=work.group,
            max_completion_length=work.new,
            temperature=1.0,
            beta=0.0,
            report_to="none",
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(config).float(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts()}),
            processing_class=tokenizer,
        )
        trainer.model.train()

        def run(new: int) -> None:
            trainer.generation_config.max_new_tokens = new
            made = trainer._generate([prompt for prompt in prompts() for _ in range(work.group)])[1]
            assert all(len(completion) == new for completion in made)

        rollout_s = timed(lambda: run(work.new), work.repeats)
        prefill_s = timed(lambda: run(1), work.repeats)
    report("trl", work, rollout_s, prefill_s)


if __name__ == "__main__":
    main()
