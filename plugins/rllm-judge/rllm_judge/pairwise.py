"""Scorer ``pairwise``: a judge compares the rollouts of a task in pairs, and Bradley-Terry strengths are the scores."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rllm_core.algorithms.group_scorer import RolloutGroup, ScorerServices, Scores
from rllm_core.services import Score
from rllm_judge.asking import NoReadableReply
from rllm_judge.contents import Contents
from rllm_judge.judges import RejectedQuestion
from rllm_judge.options import JudgeOptions
from rllm_judge.prompts import compact_question, winner_question
from rllm_judge.reading import Unreadable, winner_in, without_reasoning
from rllm_judge.scorer import JudgeScorer
from rllm_judge.transcripts import draw_ids

PLACES = ("A", "B")
PRIOR_GAMES = 1.0
MAX_ITERATIONS = 100
TOLERANCE = 1e-9


class PairwiseOptions(JudgeOptions, use_attribute_docstrings=True):
    """``algorithm.group_scorer_options`` of ``pairwise``."""

    comparisons_per_rollout: Annotated[int, Field(ge=2)] = 6
    """Number of rollouts to compare each one with. In groups up to this size, all pairs are compared."""
    passes: Literal[1, 2] = 2
    """2 asks about every pair in both orders. This cancels a preference for a position; the part `agreement` reports
    how often both orders have the same winner.
    """
    style: Literal["full", "compact"] = "full"
    """`compact` asks without rules and rubric, for a small model that was taught to answer A or B."""


class Pairwise(JudgeScorer):
    """Scores the rollouts of a task by letting a judge compare them in pairs.

    A rollout's score is its strength in the model of Bradley and Terry (Biometrika 39, 1952): its probability of
    winning against an average rollout of the group, from 0 to 1. Each rollout also draws one virtual game against an
    average one, so that a rollout that wins or loses all games has a finite strength.

    Parts of a score: ``comparisons``; ``agreement`` with two passes.
    """

    options_model = PairwiseOptions
    options: PairwiseOptions

    async def score(self, group: RolloutGroup, services: ScorerServices) -> Scores:
        """See `rllm_core.algorithms.group_scorer.GroupScorer.score`."""
        contents = Contents.of(group, self.options.max_transcript_characters)
        chosen = pairs(len(contents.texts), self.options.comparisons_per_rollout, contents.seed)
        problems: list[str] = []
        comparing = [asyncio.ensure_future(self._compare(contents, pair, problems)) for pair in chosen]
        await asyncio.gather(*comparing, return_exceptions=True)  # none may outlive the group, whose costs it has
        games = {pair: results for pair, one in zip(chosen, comparing, strict=True) if (results := one.result())}
        strengths = bradley_terry(len(contents.texts), games)
        both = [results for results in games.values() if len(results) == 2]
        parts = {"agreement": fmean(float(one == other) for one, other in both)} if both else {}
        result: dict[str, Score | None] = {}
        for rollout, number in contents.numbers.items():
            strength = strengths.get(number)
            compared = sum(number in pair for pair in games)
            result[rollout] = None if strength is None else Score(strength, {**parts, "comparisons": float(compared)})
        return self.known(result, problems)

    async def _compare(self, contents: Contents, pair: tuple[int, int], problems: list[str]) -> list[float]:
        """Returns the first rollout's share of the win in each answered pass: 1, 0, or 0.5 for a draw.

        Adds what prevented an answer to ``problems``.
        """
        order = pair if random.Random(contents.seed_of(pair)).random() < 0.5 else pair[::-1]
        results = []
        for numbers in (order, order[::-1])[: self.options.passes]:
            try:
                winner = await self._winner(contents, numbers)
            except (NoReadableReply, RejectedQuestion) as error:
                problems.append(str(error))
                continue
            results.append(0.5 if winner is None else float(winner == pair[0]))
        return results

    async def _winner(self, contents: Contents, numbers: Sequence[int]) -> int | None:
        """Returns the number of the better rollout, or None for a draw."""
        seed = contents.seed_of(numbers)
        names = [str(number) for number in numbers]
        if self.options.style == "compact":
            ids = dict(zip(PLACES, names, strict=True))
            question = compact_question(contents, ids)
        else:
            ids = draw_ids(names, seed)
            question = winner_question(self.options.rubric, contents, ids)
        read = _letter if self.options.style == "compact" else lambda reply: winner_in(reply, ids)
        winner = await self.questions.ask(question, read, seed=seed)
        return None if winner is None else int(ids[winner])


def pairs(contents: int, each: int, seed: int) -> list[tuple[int, int]]:
    """Chooses the pairs to compare: all, or a ring that compares each rollout with ``each`` others, or one more."""
    if contents - 1 <= each:
        return list(combinations(range(contents), 2))
    ring = list(range(contents))
    random.Random(seed).shuffle(ring)
    chords = {
        tuple(sorted((ring[place], ring[(place + distance) % contents])))
        for place in range(contents)
        for distance in range(1, math.ceil(each / 2) + 1)
    }
    return sorted((one, other) for one, other in chords)


def bradley_terry(contents: int, games: Mapping[tuple[int, int], Sequence[float]]) -> dict[int, float]:
    """Returns each competitor's probability of winning against an average one, from the results of its games.

    Maximizes the likelihood by Newton's method, counting one draw against an average competitor. Competitors that no
    chain of games connects to the largest component are left out, because nothing compares them with it. A single
    competitor without games gets 0.5.

    Args:
        contents: Number of competitors.
        games: Results of each pair, as the first competitor's share of the win.
    """
    members = _largest_part(contents, games)
    if not members or (len(members) == 1 and contents > 1):
        return {}
    place = {number: row for row, number in enumerate(members)}
    wins = np.zeros((len(members), len(members)))
    for (one, other), results in games.items():
        if one in place:
            wins[place[one], place[other]] += sum(results)
            wins[place[other], place[one]] += len(results) - sum(results)
    played, strengths = wins + wins.T, np.zeros(len(members))
    for _ in range(MAX_ITERATIONS):
        shares, scores = _logistic(strengths[:, None] - strengths), _logistic(strengths)
        gradient = wins.sum(1) - (played * shares).sum(1) + PRIOR_GAMES * (0.5 - scores)
        curvature = played * shares * (1 - shares)
        hessian = np.diag(curvature.sum(1) + PRIOR_GAMES * scores * (1 - scores)) - curvature
        step = np.linalg.solve(hessian, gradient)
        longest = float(np.abs(step).max())
        strengths += step / max(longest, 1.0)
        if longest < TOLERANCE:
            break
    return dict(zip(members, _logistic(strengths).tolist(), strict=True))


def _logistic(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = 1 / (1 + np.exp(-values))
    return result


def _largest_part(contents: int, games: Mapping[tuple[int, int], Sequence[float]]) -> list[int]:
    part = list(range(contents))  # representative of each competitor's component
    for one, other in games:
        before, after = part[other], part[one]
        part = [after if value == before else value for value in part]
    largest = max(set(part), key=lambda value: (part.count(value), -value), default=None)
    return [number for number, value in enumerate(part) if value == largest]


def _letter(reply: str) -> str:
    letter = without_reasoning(reply).strip()
    if letter not in PLACES:
        raise Unreadable(f"{letter!r:.40} is neither A nor B")
    return letter
