"""Scores whole groups: the run's group scorer sets the rewards of a task's rollouts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rllm_core.algorithms.group_scorer import GroupScorer, RolloutGroup, Unscorable, checked_scores
from rllm_core.config import RunConfig
from rllm_core.costs import JUDGE, Tally, collecting, current, spend
from rllm_core.engine import RolloutEngine, TITOCompleter, TokenSource
from rllm_core.errors import StallError, UserError
from rllm_core.file_references import section_name
from rllm_core.limits.timeouts import close_within, stop, within
from rllm_core.scope import RolloutScope
from rllm_core.seeds import derive_seed
from rllm_core.services import Score
from rllm_core.training.requests import RequestMerger
from rllm_core.training.rollouts import Rollout, RolloutRunner
from rllm_core.types import Episode, MessageLike, SamplingParams, Step, Task, Trajectory, freeze

SCORE = "group_scorer"
"""Key of an episode's metadata for its score, including the parts that are texts."""

CLOSING_TIMEOUT_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredGroup:
    """Rollouts of a group with their scores.

    Attributes:
        episodes: Episodes in the given order, with scores as rewards; an unscored episode has no reward.
        rewards: Reward by rollout id; None for an unscored rollout.
        error: Why the last attempt to score the group failed; None if the group was scored.
    """

    episodes: list[Episode]
    rewards: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


class Scoring:
    """Calls the group scorer of a run, with a timeout and several attempts.

    Args:
        runner: Rollout runner, through which the scorer can sample from the policy.
        engine: Engine of the scorer's own model; None to sample from the policy.

    Attributes:
        in_progress: Number of groups that are being scored.
    """

    def __init__(
        self, scorer: GroupScorer, runner: RolloutRunner, engine: RolloutEngine | None, config: RunConfig
    ) -> None:
        self.scorer = scorer
        self.in_progress = 0
        self._name = section_name(config.algorithm.group_scorer)
        self._config = config
        self._runner = runner
        self._merger = None if engine is None else RequestMerger(engine, config.rollout, lockstep=False)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Opens the scorer for the duration of the context, and closes it even after an error.

        Raises:
            StallError: If opening times out.
        """
        seconds = self._config.training.backend_timeout_seconds
        await within(seconds, f"open() of {self.scorer.label}", self.scorer.open(self))
        try:
            yield
        finally:
            what = f"close() of {self.scorer.label}"
            await close_within(CLOSING_TIMEOUT_SECONDS, what, self.scorer.close, logger.warning)
            if self._merger is not None:
                await self._merger.aclose()

    # ----------------------------------------------------------------------------------------------------------------
    # Services of the scorer

    async def complete(
        self, messages: Sequence[MessageLike], *, seed: int, max_response_tokens: int, temperature: float = 0.0
    ) -> Step:
        """See `rllm_core.algorithms.group_scorer.ScorerServices.complete`."""
        params = SamplingParams(temperature=temperature, max_response_tokens=max_response_tokens)
        tally = Tally()
        try:
            if self._merger is not None:
                return await self._sampled(self._merger.engine, self._merger, messages, params, seed, tally)
            async with self._runner.asking() as source:
                return await self._sampled(self._runner.engine, source, messages, params, seed, tally)
        finally:
            for amounts in tally.to_dict().values():
                spend(JUDGE, **{"calls": 0, **amounts})

    def count(self, *, prompt_tokens: int, completion_tokens: int) -> None:
        """See `rllm_core.algorithms.group_scorer.ScorerServices.count`."""
        spend(JUDGE, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)

    async def _sampled(
        self,
        engine: RolloutEngine,
        source: TokenSource,
        messages: Sequence[MessageLike],
        params: SamplingParams,
        seed: int,
        tally: Tally,
    ) -> Step:
        limit, scope = self._config.rollout.max_prompt_tokens, RolloutScope("a question of the scorer", tally=tally)
        completer = TITOCompleter(
            engine, source=source, sampling_params=params, seed=seed, max_prompt_tokens=limit, scope=scope
        )
        return await completer.complete(messages)

    # ----------------------------------------------------------------------------------------------------------------
    # Groups

    async def score(self, task: Task, episodes: Sequence[Episode], purpose: str, ordinal: int) -> ScoredGroup:
        """Scores the rollouts of one task.

        Failed episodes stay as they are. ``ordinal`` is the position in the task stream, or among validated tasks.

        Raises:
            UserError: If the scorer reports a problem that only the user can fix.
        """
        left_out = self._config.algorithm.filter_termination_reasons if purpose == "train" else ()
        shown = [one for one in episodes if one.trajectories and one.termination_reason.value not in left_out]
        if not shown:
            return ScoredGroup(list(episodes))
        run_seed = self._config.training.seed
        seed = derive_seed(run_seed, "score", purpose, ordinal)
        group = RolloutGroup(task, tuple(shown), purpose != "train", seed, run_seed)
        self.in_progress += 1
        tally, began = Tally(current()), time.perf_counter()
        try:
            with collecting(tally):
                scores, error = await self._scores(group)
        finally:
            self.in_progress -= 1
            tally.add(JUDGE, seconds=time.perf_counter() - began)
            tally.close(scored=f"{purpose}-{ordinal}")
        scored = [self._with_score(one, scores, error) if one.rollout_id in scores else one for one in episodes]
        rewards = {rollout: None if score is None else float(score) for rollout, score in scores.items()}
        return ScoredGroup(scored, rewards, error)

    async def score_rollouts(
        self, rollouts: Sequence[Rollout], tasks: Sequence[Task], purpose: str
    ) -> tuple[list[Rollout], list[tuple[str, str]]]:
        """Scores the rollouts of a validation or an evaluation by task.

        Args:
            rollouts: ``(rollouts,)`` rollouts that have ended.
            tasks: ``(rollouts,)`` their tasks.
            purpose: ``validation`` or ``eval``.

        Returns:
            The rollouts in the given order, and the task id and error of each group that could not be scored.

        Raises:
            UserError: See `score`.
        """
        places: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            places.setdefault(task.task_id, []).append(place)
        groups = list(places.values())
        calls = [
            asyncio.ensure_future(
                self.score(tasks[group[0]], [rollouts[place].episode for place in group], purpose, ordinal)
            )
            for ordinal, group in enumerate(groups)
        ]
        try:
            scored = await asyncio.gather(*calls)
        except BaseException:
            await stop(*calls)  # if one raises, the others must stop
            raise
        result, errors = list(rollouts), []
        for group, of_group in zip(groups, scored, strict=True):
            if of_group.error is not None:
                errors.append((tasks[group[0]].task_id, of_group.error))
            for place, episode in zip(group, of_group.episodes, strict=True):
                result[place] = replace(rollouts[place], episode=episode)
        return result, errors

    async def _scores(self, group: RolloutGroup) -> tuple[dict[str, Score | None], str | None]:
        """Calls the scorer until it returns valid scores; if it never does, all rollouts are unscored."""
        algorithm = self._config.algorithm
        error = ""
        for _ in range(algorithm.group_scorer_attempts):
            try:
                scoring = self.scorer.score(group, self)
                scores = await within(algorithm.group_scorer_timeout_seconds, self.scorer.label, scoring)
                return checked_scores(scores, group), None
            except Unscorable as reason:
                error = f"{self.scorer.label} scored no rollout: {reason}"
                break
            except StallError as late:
                error = str(late)
            except UserError:
                raise
            except Exception as failure:  # the class may come from any plugin
                error = f"{self.scorer.label} failed: {self.scorer.describe(failure)}"
                logger.debug("%s", error, exc_info=failure)
        return dict.fromkeys((episode.rollout_id for episode in group.episodes), None), error

    def _with_score(self, episode: Episode, scores: Mapping[str, Score | None], error: str | None) -> Episode:
        """Replaces the rewards of an episode's trainable trajectories with its score."""
        score = scores[episode.rollout_id]
        written: dict[str, Any] = {"name": self._name, "reward": None if score is None else float(score)}
        if (before := episode.reward) is not None:
            written["workflow_reward"] = before
        if error is not None:
            written["error"] = error
        numbers: dict[str, float] = {}
        if score is not None:
            written["parts"] = dict(score.parts)
            numbers = {f"{self._name}/{name}": number for name, number in score.numbers.items()}
        update = {
            "trajectories": [_rewarded(trajectory, score) for trajectory in episode.trajectories],
            "metrics": episode.metrics | numbers,
            "metadata": freeze({**episode.metadata, SCORE: written}),
        }
        return episode.model_copy(update=update)


def _rewarded(trajectory: Trajectory, score: Score | None) -> Trajectory:
    if not trajectory.trainable:
        return trajectory
    steps = [
        step
        if step.reward is None and step.token_rewards is None
        else step.model_copy(update={"reward": None, "token_rewards": None})
        for step in trajectory.steps
    ]
    return trajectory.model_copy(update={"reward": None if score is None else float(score), "steps": steps})
