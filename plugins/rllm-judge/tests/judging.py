"""Scripted judges that read the questions of this package as a model would, and groups for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm_core.algorithms.group_scorer import GroupScorer, RolloutGroup
from rllm_core.types import MessageLike
from rllm_devkit.checks.group_scorers import ScriptedScorerServices, group_of

_LINE = re.compile(r"^([A-Z]{4}): (.*)$", re.M)


def shown(messages: Sequence[MessageLike]) -> dict[str, str]:
    """Returns the transcripts of a question by id, in its order."""
    return dict(_LINE.findall(str(messages[-1]["content"])))


def answer_in(transcript: str) -> str:
    """Returns the last message of a transcript."""
    return str(json.loads(transcript)[-1]["content"])


def scoring(value: Callable[[str, int], float]) -> Callable[[Sequence[MessageLike]], str]:
    """Returns a judge that scores each answer by itself and its place in the question."""

    def reply(messages: Sequence[MessageLike]) -> str:
        entries = [
            {"id": one, "reason": f"it says {answer_in(text)}", "score": value(answer_in(text), place)}
            for place, (one, text) in enumerate(shown(messages).items())
        ]
        return json.dumps({"scores": entries})

    return reply


def preferring(value: Callable[[str, int], float]) -> Callable[[Sequence[MessageLike]], str]:
    """Returns a judge that names the better one of a pair."""

    def reply(messages: Sequence[MessageLike]) -> str:
        values = [(value(answer_in(text), place), one) for place, (one, text) in enumerate(shown(messages).items())]
        (first, one), (second, other) = values
        return json.dumps({"winner": None if first == second else one if first > second else other})

    return reply


def judged(
    scorer: GroupScorer, answers: Sequence[str] | RolloutGroup, reply: Callable[[Sequence[MessageLike]], str]
) -> tuple[list[Any], ScriptedScorerServices]:
    """Returns the score of each answer, and the services with what the judge was asked."""
    group = answers if isinstance(answers, RolloutGroup) else group_of(answers)
    services = ScriptedScorerServices(reply)

    async def run() -> Mapping[str, Any]:
        await scorer.open(services)
        try:
            return await scorer.score(group, services)
        finally:
            await scorer.close()

    scores = asyncio.run(run())
    return [scores[episode.rollout_id] for episode in group.episodes], services
