"""Times Tunix's generation on the same work."""

import numpy as np
from tunix_policy import cluster_of
from workload import PRESETS, arguments, report, timed, work_of


def main() -> None:
    work = work_of(arguments(__doc__ or "").parse_args())
    cluster = cluster_of(work)
    rng = np.random.default_rng(0)

    def run(new: int) -> None:
        # Its sampler puts one more id in front of every prompt.
        prompts = rng.integers(3, PRESETS[work.preset].vocab, (work.prompts, work.prompt_len - 1))
        asked = [" ".join(map(str, prompt)) for prompt in prompts for _ in range(work.group)]
        made = cluster.generate(asked, max_generation_steps=new)
        assert all(len(tokens) == new for tokens in made.tokens)

    rollout_s = timed(lambda: run(work.new), work.repeats)
    prefill_s = timed(lambda: run(1), work.repeats)
    report("tunix", work, rollout_s, prefill_s)


if __name__ == "__main__":
    main()
