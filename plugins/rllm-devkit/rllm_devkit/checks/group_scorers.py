"""Contract checks for group scorers; see `check_group_scorer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rllm_core.algorithms.group_scorer import GroupScorer, RolloutGroup, Unscorable, checked_scores
from rllm_core.errors import UserError
from rllm_core.types import Episode, MessageLike, MessageView, Step, Task, Trajectory, freeze, snapshot, token_ids
from rllm_devkit.checks.answers import HOSTILE
from rllm_devkit.checks.results import Check, CheckResult, Violation, checked
from rllm_devkit.scripted import ByteParser

Reply = Callable[[Sequence[MessageLike]], str]

PARSER = ByteParser()


@dataclass
class ScriptedScorerServices:
    """Services for tests of group scorers: answers every call with a text.

    Attributes:
        reply: Returns the answer to some messages.
        asked: Messages of each call so far.
        counted: Prompt and completion tokens of calls that the scorer made and counted itself.
    """

    reply: Reply
    asked: list[Sequence[MessageLike]] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)

    async def complete(
        self, messages: Sequence[MessageLike], *, seed: int, max_response_tokens: int, temperature: float = 0.0
    ) -> Step:
        """Returns a step with the scripted answer."""
        self.asked.append(messages)
        await asyncio.sleep(0)
        return step(messages, self.reply(messages))

    def count(self, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Records the token counts of a call."""
        self.counted.append((prompt_tokens, completion_tokens))


def step(messages: Sequence[MessageLike], answer: str) -> Step:
    """Returns a step that answers with a text, in the tokens of `rllm_devkit.scripted.ByteParser`."""
    completion = [*answer.encode(errors="replace"), PARSER.END]
    return Step(
        messages=snapshot(messages, MessageView()),
        response=freeze({"role": "assistant", "content": answer}),
        prompt_ids=token_ids(PARSER.render(messages)),
        completion_ids=token_ids(completion),
        logprobs=np.full(len(completion), -0.5, np.float32),
        weight_version=0,
    )


def group_of(
    answers: Sequence[str], *, question: str = "Say something.", rewards: Sequence[float] = ()
) -> RolloutGroup:
    """Returns a group whose rollouts gave these answers to a question, with the workflow's own rewards if given."""
    asked = [{"role": "user", "content": question}]
    episodes = [
        Episode(
            task_id="task",
            rollout_id=f"train-0-0-{index}-0",
            rollout_index=index,
            trajectories=[
                Trajectory(steps=[step(asked, answer)], reward=rewards[index] if index < len(rewards) else None)
            ],
        )
        for index, answer in enumerate(answers)
    ]
    return RolloutGroup(Task(task_id="task", data={"question": question}), tuple(episodes), False, 7, 7)


async def check_group_scorer(scorer: GroupScorer) -> list[CheckResult]:
    """Checks a group scorer against its contract, with scripted answers of its model or of the policy.

    In a test: ``assert not [r for r in await check_group_scorer(mine) if r.outcome == "failed"]``. A scorer that calls
    a model on its own needs a working model.

    Args:
        scorer: Scorer to check, with its options.

    Returns:
        One result per check.
    """
    services = ScriptedScorerServices(lambda messages: "I cannot tell.")
    await scorer.open(services)
    try:
        return await checked(_GroupScorerProbe(scorer), GROUP_SCORER_CHECKS)
    finally:
        await scorer.close()


@dataclass(frozen=True)
class _GroupScorerProbe:
    """Group scorer under test."""

    scorer: GroupScorer

    async def scores(self, group: RolloutGroup, answer: str = "I cannot tell.") -> dict[str, float | None]:
        """Returns valid scores; None for all if the scorer raised, as in a run after the last attempt."""
        unscored: dict[str, float | None] = dict.fromkeys(episode.rollout_id for episode in group.episodes)
        try:
            returned = await self.scorer.score(group, ScriptedScorerServices(lambda messages: answer))
        except UserError as error:
            raise Violation(f"a text ended the run: {error}") from error
        except Exception:  # the contract allows it: the run tries again
            return unscored
        try:
            return dict(checked_scores(returned, group))
        except Unscorable:
            return unscored
        except ValueError as error:
            raise Violation(str(error)) from error


async def _valid(probe: _GroupScorerProbe) -> str:
    sizes = (1, 2, 4, 9)
    for size in sizes:
        await probe.scores(group_of([f"answer {number}" for number in range(size)]))
    return f"groups of {', '.join(map(str, sizes))} rollouts"


async def _hostile(probe: _GroupScorerProbe) -> str:
    for start in range(0, len(HOSTILE), 4):
        await probe.scores(group_of(HOSTILE[start : start + 4]))
    return f"{len(HOSTILE)} answers"


async def _unreadable(probe: _GroupScorerProbe) -> str:
    for answer in HOSTILE:
        await probe.scores(group_of(["yes", "no"]), answer)
    return f"{len(HOSTILE)} answers of the scorer's model"


async def _repeatable(probe: _GroupScorerProbe) -> str:
    group = group_of(["yes", "no", "maybe", ""])
    first, again = await probe.scores(group), await probe.scores(group)
    if first != again:
        raise Violation(f"the same group got the scores {first}, and later {again}; draw from group.seed only")
    return "a second call returns the same scores"


async def _no_side_effects(probe: _GroupScorerProbe) -> str:
    group = group_of(["yes", "no"], rewards=[1.0, 0.0])
    before = [episode.to_json() for episode in group.episodes]
    await probe.scores(group)
    if [episode.to_json() for episode in group.episodes] != before:
        raise Violation("score() changed an episode; return the scores, and leave the episodes as they are")
    return "the episodes are unchanged"


GROUP_SCORER_CHECKS: dict[str, Check[_GroupScorerProbe]] = {
    "valid scores": _valid,
    "hostile texts": _hostile,
    "unreadable answers": _unreadable,
    "repeatable": _repeatable,
    "no side effects": _no_side_effects,
}
