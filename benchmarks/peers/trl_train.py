"""Times TRL's training step on the same work: GRPO loss, backward pass, one AdamW update on a fixed batch."""

import tempfile

import numpy as np
import torch
from trl_policy import as_text, trainer_of
from workload import PRESETS, arguments, report_step, timed, work_of


def main() -> None:
    work = work_of(arguments(__doc__ or "").parse_args())
    rng = np.random.default_rng(0)
    vocab = PRESETS[work.preset].vocab
    texts = as_text(rng.integers(3, vocab, (work.prompts, work.prompt_len)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(work, texts, folder)
        prompts = rng.integers(3, vocab, (work.prompts, work.prompt_len)).repeat(work.group, axis=0)
        batch = {
            "prompt_ids": torch.tensor(prompts),
            "prompt_mask": torch.ones(prompts.shape, dtype=torch.long),
            "completion_ids": torch.tensor(rng.integers(3, vocab, (work.sequences, work.new))),
            "completion_mask": torch.ones((work.sequences, work.new), dtype=torch.long),
            "advantages": torch.randn(work.sequences),
            "num_items_in_batch": torch.tensor(work.sequences * work.new),
        }
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, weight_decay=0.0)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()

        def step() -> None:
            loss = trainer.compute_loss(trainer.model_wrapped, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        report_step("trl", work, timed(step, work.repeats))


if __name__ == "__main__":
    main()
