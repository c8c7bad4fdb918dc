"""What a sampler is asked for an assignment."""

from dataclasses import dataclass

from jaxrl_llm.rollout.coordinator import Assignment
from jaxrl_llm.rollout.turns import next_request
from jaxrl_llm.types import SampleRequest, Sampling


@dataclass(frozen=True)
class HowToSample:
    """Sampling and seed of training and of evaluation; the seeds differ, so that no key serves twice.

    Both are of a completion's first turn; a later one has as many tokens as are left for it.
    """

    training: Sampling
    training_seed: int
    evaluation: Sampling
    evaluation_seed: int

    def requests(self, assignment: Assignment) -> list[SampleRequest]:
        """One request for each sibling of `assignment`, in their order."""
        sampling, seed = (
            (self.training, self.training_seed)
            if assignment.pinned is None
            else (self.evaluation, self.evaluation_seed)
        )
        tokens, stream = assignment.task.tokens_T, assignment.stream
        requests = [SampleRequest(tokens, sampling, seed, stream, sibling) for sibling in assignment.siblings]
        return requests if assignment.turn is None else [next_request(one, assignment.turn) for one in requests]
