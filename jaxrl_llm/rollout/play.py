"""Completions of given prompts on a scheduler of one's own, with all their turns."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from jaxrl_llm.envs.turns import extended
from jaxrl_llm.rollout.local import Scheduler
from jaxrl_llm.rollout.turns import Tools, next_request
from jaxrl_llm.types import Completion, PromptTask, SampleRequest, Turn


def play(
    scheduler: Scheduler, requests: Sequence[SampleRequest], tasks: Sequence[PromptTask], tools: Tools | None
) -> list[Completion]:
    """The completions of `requests`, each for its task, on a scheduler that nobody else uses; with all their turns
    where there are `tools`. Sampling goes on while tools work."""
    done: dict[int, Completion] = {}
    asked = dict(zip(scheduler.submit(requests), range(len(requests)), strict=True))
    before: dict[int, Turn] = {}
    answers: dict[Future[Turn], int] = {}
    with ThreadPoolExecutor(1 if tools is None else tools.at_once) as threads:
        while answers or not scheduler.idle:
            for request, completion in scheduler.step() if not scheduler.idle else ():
                place = asked.pop(request)
                if place in before:
                    completion = extended(before.pop(place).completion, completion)
                if tools is not None and completion.finish == "stop_string":
                    answers[threads.submit(tools.next_turn, tasks[place], completion)] = place
                else:
                    done[place] = completion
            ended, _ = wait(answers, timeout=None if scheduler.idle else 0, return_when=FIRST_COMPLETED)
            for answer in ended:
                place, turn = answers.pop(answer), answer.result()
                if turn.more:
                    before[place] = turn
                    asked[scheduler.submit([next_request(requests[place], turn)])[0]] = place
                else:
                    done[place] = turn.completion
    return [done[place] for place in range(len(requests))]
