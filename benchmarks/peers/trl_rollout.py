"""Times TRL's generation (GRPOTrainer's regular path over transformers) on the same work."""

import tempfile

import numpy as np
from trl_policy import as_text, trainer_of
from workload import PRESETS, arguments, report, timed, work_of


def main() -> None:
    work = work_of(arguments(__doc__ or "").parse_args())
    rng = np.random.default_rng(0)

    def prompts() -> list[str]:
        return as_text(rng.integers(3, PRESETS[work.preset].vocab, (work.prompts, work.prompt_len)))

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(work, prompts(), folder)
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
