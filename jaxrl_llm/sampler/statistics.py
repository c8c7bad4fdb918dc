"""What the scheduler has done so far, in totals."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    """Totals since the scheduler was made.

    `slot_steps` counts decode steps times slots, `decoded_tokens` those of them that made a token of a request. The
    first token of a completion comes from its prompt's prefill and is in `tokens_generated` only. `busy_s`: a dispatch
    was under way. `gap_s`: there was work, and none was. `queue_s`: summed over requests, from submission to slot.
    """

    requests_submitted: int = 0
    requests_admitted: int = 0
    requests_completed: int = 0
    requests_aborted: int = 0
    prompts_prefilled: int = 0
    prompts_scored: int = 0
    prefill_tokens: int = 0
    tokens_generated: int = 0
    decoded_tokens: int = 0
    slot_steps: int = 0
    dispatches: int = 0
    weight_updates: int = 0
    busy_s: float = 0.0
    gap_s: float = 0.0
    queue_s: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of slot-steps that made a token; 0 before the first step."""
        return self.decoded_tokens / self.slot_steps if self.slot_steps else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the time with work in which the device had none; 0 before the first dispatch."""
        return self.gap_s / (self.busy_s + self.gap_s) if self.busy_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second with work; 0 before the first dispatch."""
        return self.tokens_generated / (self.busy_s + self.gap_s) if self.busy_s else 0.0

    @property
    def queue_s_mean(self) -> float:
        """Mean seconds from submission to a slot; 0 before the first admission."""
        return self.queue_s / self.requests_admitted if self.requests_admitted else 0.0
