"""Times Tunix's training step on the same work: GRPO loss, backward pass, one AdamW update on a fixed batch."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.grpo import grpo_learner
from tunix_policy import cluster_of
from workload import PRESETS, arguments, report_step, timed, work_of


def main() -> None:
    work = work_of(arguments(__doc__ or "").parse_args())
    cluster = cluster_of(work)
    grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda completions, **_: [0.0] * len(completions),
        algo_config=grpo_learner.GRPOConfig(num_generations=work.group, num_iterations=1, beta=0.0, epsilon=0.2),
    )
    rng = np.random.default_rng(0)
    vocab = PRESETS[work.preset].vocab
    prompts = rng.integers(3, vocab, (work.prompts, work.prompt_len)).repeat(work.group, axis=0)
    completions = rng.integers(3, vocab, (work.sequences, work.new))
    advantages = rng.standard_normal(work.sequences).astype(np.float32)

    def step() -> None:
        example = grpo_learner.TrainExample(
            prompt_ids=jnp.asarray(prompts),
            prompt_mask=jnp.ones(prompts.shape, bool),
            completion_ids=jnp.asarray(completions),
            completion_mask=jnp.ones(completions.shape, bool),
            advantages=jnp.asarray(advantages),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )
        cluster.update_actor([example], None, False)
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param)))

    report_step("tunix", work, timed(step, work.repeats))


if __name__ == "__main__":
    main()
