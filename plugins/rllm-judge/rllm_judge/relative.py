"""Scorer ``relative``: a judge compares the rollouts of a task and scores each from 0 to 1."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from rllm_core.algorithms.group_scorer import RolloutGroup, ScorerServices, Scores
from rllm_core.services import Score
from rllm_judge.asking import NoReadableReply
from rllm_judge.contents import Contents
from rllm_judge.judges import RejectedQuestion
from rllm_judge.options import JudgeOptions
from rllm_judge.prompts import scores_question
from rllm_judge.reading import Graded, scores_in
from rllm_judge.scorer import JudgeScorer
from rllm_judge.transcripts import draw_ids


class RelativeOptions(JudgeOptions, use_attribute_docstrings=True):
    """``algorithm.group_scorer_options`` of ``relative``."""

    passes: Literal[1, 2] = 1
    """2 asks again with the rollouts in the opposite order, and takes the mean. It cancels a preference for positions;
    the part `agreement` reports how often both orders rank two rollouts alike.
    """
    rollouts_per_question: Annotated[int, Field(ge=2)] = 8
    """Maximum rollouts in one question. Larger groups are split into overlapping sets, as are groups whose question
    is too long for the judge.
    """


@dataclass(frozen=True)
class JudgeScores:
    """Scores of one set of rollouts, in the order in which the judge saw them.

    Attributes:
        graded: Score and reason by content number.
    """

    graded: Mapping[int, Graded]

    @property
    def order_effect(self) -> float:
        """Mean score of the first half of the positions, minus that of the last half."""
        scores = [graded.score for graded in self.graded.values()]
        half = len(scores) // 2
        return fmean(scores[:half]) - fmean(scores[-half:]) if half else 0.0


class Relative(JudgeScorer):
    """Scores the rollouts of a task by letting a judge compare them.

    The judge sees the messages that all rollouts share once, then the rest of each rollout under an id that is drawn
    for the question, in random order. Rollouts with the same content are shown once and get the same score.

    Parts of a score: ``reason``; ``agreement`` and ``order_effect`` with two passes.
    """

    options_model = RelativeOptions
    options: RelativeOptions

    async def score(self, group: RolloutGroup, services: ScorerServices) -> Scores:
        """See `rllm_core.algorithms.group_scorer.GroupScorer.score`."""
        contents = Contents.of(group, self.options.max_transcript_characters)
        order = list(range(len(contents.texts)))
        random.Random(contents.seed).shuffle(order)
        problems: list[str] = []
        answers = [
            await self._pass(contents, order[::direction], problems) for direction in (1, -1)[: self.options.passes]
        ]
        passes = [aligned(of_pass) for of_pass in answers]
        heard = [scores for scores in passes if scores]
        agreed = agreement(*heard) if len(heard) == 2 else None
        effects = [answer.order_effect for of_pass in answers for answer in of_pass]
        parts: dict[str, float | str] = {} if agreed is None else {"agreement": agreed, "order_effect": fmean(effects)}
        result: dict[str, Score | None] = {}
        for rollout, number in contents.numbers.items():
            known = [scores[number] for scores in heard if number in scores]
            if not heard or len(known) < len(heard):
                result[rollout] = None
                continue
            reasons = [answer.graded[number].reason for answer in answers[0] if number in answer.graded]
            result[rollout] = Score(fmean(known), {**parts, "reason": next(filter(None, reasons), "")})
        return self.known(result, problems)

    async def _pass(self, contents: Contents, order: Sequence[int], problems: list[str]) -> list[JudgeScores]:
        """Asks for the scores of all rollouts, in one order; adds what prevented an answer to ``problems``."""
        answers: list[JudgeScores] = []
        waiting = overlapping(order, self.options.rollouts_per_question)
        while waiting:
            numbers = waiting.pop(0)
            ids = draw_ids([str(number) for number in numbers], contents.seed_of(numbers))
            question = scores_question(self.options.rubric, contents, ids)
            try:
                graded = await self.questions.ask(question, partial(scores_in, ids=ids), seed=contents.seed_of(numbers))
            except (NoReadableReply, RejectedQuestion) as error:
                problems.append(str(error))
                if isinstance(error, RejectedQuestion) and len(numbers) > 2:
                    waiting[:0] = overlapping(numbers, len(numbers) // 2 + 1)
                continue
            answers.append(JudgeScores({int(ids[one]): graded[one] for one in ids}))
        return answers


def overlapping(order: Sequence[int], most: int) -> list[Sequence[int]]:
    """Splits an order into sets of at most ``most`` that share a quarter, and at least one, with the next set."""
    if len(order) <= most:
        return [order]
    stride = most - max(most // 4, 1)
    starts = [*range(0, len(order) - most, stride), len(order) - most]
    return [order[start : start + most] for start in starts]


def aligned(answers: Sequence[JudgeScores]) -> dict[int, float]:
    """Brings the scores of overlapping sets to one scale.

    A judge scores each set on a scale of its own. Each set is shifted by the mean difference between its scores and the
    earlier ones of the rollouts that it shares with the sets before it. Sets not connected to the largest component are
    left out, because their scores cannot be compared.

    Returns:
        ``{content number: score}``, from 0 to 1.
    """
    parts: list[list[JudgeScores]] = []
    for answer in answers:
        touched = [part for part in parts if any(answer.graded.keys() & other.graded.keys() for other in part)]
        parts = [part for part in parts if part not in touched]
        parts.append([*(other for part in touched for other in part), answer])
    largest = max(parts, key=lambda part: len({number for one in part for number in one.graded}), default=[])
    found: dict[int, list[float]] = {}
    left = list(largest)
    while left:
        # Some set of a connected component always shares a rollout with those already placed.
        answer = next((one for one in left if found.keys() & one.graded.keys()), left[0])
        left.remove(answer)
        shared = found.keys() & answer.graded.keys()
        shift = fmean(fmean(found[number]) - answer.graded[number].score for number in shared) if shared else 0.0
        for number, graded in answer.graded.items():
            found.setdefault(number, []).append(graded.score + shift)
    return {number: min(max(fmean(scores), 0.0), 1.0) for number, scores in found.items()}


def agreement(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """Returns the share of pairs that two passes rank alike; a tie in only one pass counts half.

    None if fewer than two rollouts have scores in both passes.
    """
    both = sorted(first.keys() & second.keys())
    votes = []
    for one, other in combinations(both, 2):
        order = [_sign(scores[one] - scores[other]) for scores in (first, second)]
        votes.append(1.0 if order[0] == order[1] else 0.5 if 0 in order else 0.0)
    return fmean(votes) if votes else None


def _sign(difference: float) -> int:
    return (difference > 1e-9) - (difference < -1e-9)
