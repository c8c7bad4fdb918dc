"""Our losses against TRL's on random inputs: value and gradient, through TRL's own loss code.

Not in the ordinary suite; see README.md in this folder. TRL's `_compute_loss` (of GRPOTrainer and of RLOOTrainer) runs
on a stand-in trainer whose model returns our random log-probabilities. Differences that are meant:

- Importance ratios of sampler and trainer are not made in TRL's loss but where it generates; that formula is restated
  here in torch (`restated_ratio`). TRL does not bound log-ratios; we clamp them to +-20.
- TRL's RLOO clips the ratio of the whole completion to the step before. Ours is REINFORCE with a leave-one-out
  baseline: the same gradient where each batch is used once (ratio 1), which is what is compared.
- TRL's entropy bonus is a mean over tokens whatever the loss averages; ours is weighted like the loss. They are equal
  under a token average, which is what is compared.
- TRL's `bnpo` and, per microbatch, its `grpo` and `dr_grpo` average what one microbatch holds; our weights are those of
  the optimizer batch. Equal for one microbatch, which is what is compared.
- TRL multiplies by the mask last, so that NaN where nothing is trained would reach its loss; ours never reads it.
- TRL divides a group's advantages by std + 1e-4, we by std + 1e-6; advantages are given to both here.
- Dual clip: TRL's `delta` caps the ratio of good completions too, which changes nothing while delta > 1 + clip_high.
"""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.aggregate import completion_weights
from jaxrl_llm.losses.algorithms import KL_ESTIMATORS, bind, bind_corrections

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default"),  # other people's imports
]

N, T, BUDGET = 12, 9, 16
LENGTHS = np.array([1, 3, 9, 4, 2, 7, 5, 9, 6, 8, 1, 2])
GROUPS = np.arange(N) // 4
MASK = np.arange(T) < LENGTHS[:, None]


def draw(seed):
    rng = np.random.default_rng(seed)
    logp = rng.normal(-1.5, 0.7, (N, T))
    near = {name: logp + rng.normal(0, 0.25, (N, T)) for name in ("old", "sampler", "reference")}
    advantages = rng.normal(0, 1, N)
    return {"logp": logp, "entropy": rng.uniform(0.1, 2.0, (N, T)), "advantages": advantages, **near}


CASES = {
    # name: (TRL's settings, our objective and its constants, corrections, aggregation, {} or kl / entropy)
    "grpo": ({"loss_type": "grpo"}, ("ppo", {}), {}, "sample", {}),
    "grpo with k3": ({"loss_type": "grpo", "beta": 0.04}, ("ppo", {}), {}, "sample", {"kl": 0.04}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, ("ppo", {}), {}, "constant", {}),
    "bnpo": ({"loss_type": "bnpo"}, ("ppo", {}), {}, "token", {}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, ("ppo", {"clip_high": 0.28}), {}, "token", {}),
    "dapo with entropy": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01},
        ("ppo", {"clip_high": 0.28}),
        {},
        "token",
        {"entropy": 0.01},
    ),
    "dual clip": ({"loss_type": "grpo", "delta": 1.4}, ("ppo", {"dual_clip": 1.4}), {}, "sample", {}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, ("cispo", {"ratio_cap": 1.2}), {}, "token", {}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.05},
        ("gspo", {"clip_low": 0.03, "clip_high": 0.05}),
        {},
        "sample",
        {},
    ),
    "tis": ({"loss_type": "dapo", "ratio": ("token", 1.3, False)}, ("ppo", {}), {"tis": {"cap": 1.3}}, "token", {}),
    "sequence tis": (
        {"loss_type": "grpo", "ratio": ("sequence", 1.5, False)},
        ("ppo", {}),
        {"tis_sequence": {"cap": 1.5}},
        "sample",
        {},
    ),
    "mis": (
        {"loss_type": "dapo", "ratio": ("token", 1.3, True)},
        ("ppo", {}),
        {"mis": {"low": 0.0, "high": 1.3}},
        "token",
        {},
    ),
    "off-policy mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        ("ppo", {}),
        {"off_policy_mask": {"delta": 0.05}},
        "sample",
        {},
    ),
}


def restated_ratio(torch, old, sampler, level, cap, rejects):
    difference = (old - sampler) * torch.tensor(MASK)
    ratio = torch.exp(difference.sum(-1, keepdim=True) if level == "sequence" else difference)
    return ratio.masked_fill(ratio > cap, 0.0) if rejects else ratio.clamp(max=cap)


def trainer_stand_in(torch, settings, logp, entropy):
    """What TRL's loss reads of its trainer, in evaluation mode: one microbatch, one process, nothing accumulated."""
    from trl import GRPOTrainer

    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        reduce=lambda x, **_: x,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        beta=settings.get("beta", 0.0),
        loss_type=settings["loss_type"],
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        use_vllm="ratio" in settings,
        vllm_importance_sampling_correction="ratio" in settings,
        max_completion_length=BUDGET,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
        entropy_coef=settings.get("entropy_coef", 0.0),
        args=SimpleNamespace(delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def inputs_for(torch, settings, tensors):
    ids, mask = torch.zeros((N, T), dtype=torch.long), torch.tensor(MASK, dtype=torch.float64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones((N, 1)),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "sampling_per_token_logps": tensors["sampler"],
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if "ratio" in settings:
        ratio = restated_ratio(torch, tensors["old"], tensors["sampler"], *settings["ratio"])
        inputs["importance_sampling_ratio"] = ratio
    return inputs


def theirs(settings, drawn):
    """(loss, its gradients with respect to log-probabilities and entropies), float64."""
    import torch
    from trl import GRPOTrainer

    tensors = {name: torch.tensor(x) for name, x in drawn.items()}
    logp, entropy = (tensors[name].requires_grad_() for name in ("logp", "entropy"))
    stand_in = trainer_stand_in(torch, settings, logp, entropy)
    loss = GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs_for(torch, settings, tensors))
    slopes = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)
    return float(loss.detach()), [np.zeros((N, T)) if g is None else g.numpy() for g in slopes]


def ours(objective, corrections, aggregation, extra, drawn):
    name, constants = objective
    # TRL's ratios are taken against its own log-probabilities at the start of the step.
    bound = bind(name, anchor=None if name == "reinforce" else "old", **constants)
    weight = bind_corrections(corrections)
    max_tokens = BUDGET if aggregation == "constant" else None
    weights_N = completion_weights(LENGTHS, GROUPS, np.ones(N, bool), kind=aggregation, max_tokens=max_tokens)

    def loss(logp, entropy):
        advantages = jnp.broadcast_to(drawn["advantages"][:, None], (N, T))
        arrays = (logp, drawn["sampler"], drawn["old"], advantages, MASK)
        j = bound(*arrays) * weight(*arrays)
        if "kl" in extra:
            j -= extra["kl"] * KL_ESTIMATORS["k3"](logp, drawn["reference"], MASK)
        if "entropy" in extra:
            j += extra["entropy"] * jnp.where(MASK, entropy, 0.0)
        return -jnp.sum(weights_N[:, None] * j)

    with jax.enable_x64(True):
        value, slopes = jax.value_and_grad(loss, (0, 1))(jnp.asarray(drawn["logp"]), jnp.asarray(drawn["entropy"]))
        return float(value), [np.asarray(x) for x in slopes]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trls(case, seed):
    settings, objective, corrections, aggregation, extra = CASES[case]
    drawn = draw(seed)
    wanted, wanted_slopes = theirs(settings, drawn)
    value, slopes = ours(objective, corrections, aggregation, extra, drawn)
    assert value == pytest.approx(wanted, rel=1e-9)
    for got, want in zip(slopes, wanted_slopes, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert np.abs(wanted_slopes[0][MASK]).max() > 1e-3


def test_rloos_gradient_equals_trls_where_a_batch_is_used_once():
    import torch
    from trl import RLOOTrainer

    drawn = draw(0)
    tensors = {name: torch.tensor(x) for name, x in drawn.items()}
    logp = tensors["logp"].requires_grad_()
    stand_in = trainer_stand_in(torch, {"loss_type": "rloo"}, logp, tensors["entropy"])
    inputs = inputs_for(torch, {}, tensors)
    inputs["old_logps"] = (logp.detach() * torch.tensor(MASK)).sum(1)
    (wanted,) = torch.autograd.grad(RLOOTrainer._compute_loss(stand_in, stand_in.model, inputs), logp)
    _, (slope, _) = ours(("reinforce", {}), {}, "sequence_sum", {}, drawn)
    np.testing.assert_allclose(slope, wanted.numpy(), rtol=1e-9, atol=1e-12)
