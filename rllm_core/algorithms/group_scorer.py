"""Contract of group scorers, which give the rollouts of a task their rewards by comparing them with each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, Protocol

from rllm_core.algorithms.options import Configured
from rllm_core.score import MAX_METRIC, MAX_REWARD, Score
from rllm_core.types import Episode, MessageLike, Step, Task


@dataclass(frozen=True)
class RolloutGroup:
    """Rollouts of one task that are scored together.

    Attributes:
        task: Task of the rollouts.
        episodes: ``(rollouts,)`` episodes, sorted by ``rollout_index``, without failed ones and without those whose
            termination reason excludes them from training.
        is_validation: Whether the rollouts belong to a validation or an evaluation, so that none of them is trained.
        seed: Seed for the scorer's random choices. Depends only on the run's seed and the group's position in the run.
        run_seed: Seed of the run. Derive seeds from it and the group's content for choices that equal groups share.
    """

    task: Task
    episodes: Sequence[Episode]
    is_validation: bool
    seed: int
    run_seed: int


@dataclass(frozen=True)
class ScorerModel:
    """A scorer's own model, which it samples from through a rollout engine that needs no backend.

    Attributes:
        engine: Name of the engine.
        path: Folder or name of the model.
        parser: Name of the parser; "" for the run file's parser.
    """

    engine: str
    path: str
    parser: str = ""


class ScorerServices(Protocol):
    """Services of a run for its group scorer."""

    async def complete(
        self, messages: Sequence[MessageLike], *, seed: int, max_response_tokens: int, temperature: float = 0.0
    ) -> Step:
        """Samples one answer from the scorer's model (`GroupScorer.model`), or from the policy if it has none.

        Requests are queued, retried and limited in time like those of rollouts, and counted.

        Raises:
            rllm_core.engine.EngineError: If the engine failed.
            rllm_core.engine.Terminated: If the prompt is longer than ``rollout.max_prompt_tokens``, or than the model.
        """
        ...

    def count(self, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Counts a call to a model that the scorer made on its own."""
        ...


class Unscorable(Exception):
    """No rollout of a group can be scored, for the reason in the message, and another attempt would not help."""


Scores = Mapping[str, Score | float | None]
"""Reward of each rollout by its ``rollout_id``; None for a rollout that could not be scored."""


class GroupScorer(Configured, ABC):
    """Scores whole groups; selected by ``algorithm.group_scorer``, with options in ``algorithm.group_scorer_options``.

    A score becomes the reward of all trainable trajectories of its rollout. It replaces the workflow's rewards, which
    the scorer finds in the episodes. The parts of a `Score` are recorded: numbers as metrics of the episode, texts in
    the episode's metadata.

    Attributes:
        model: Model to open for `ScorerServices.complete`; None to sample from the policy. Set it in ``__init__`` if it
            depends on the options; the same applies to ``frozen_version``.
        frozen_version: Weight version of the policy to sample from: 0 for the weights that the run started from,
            whatever has been trained since; None for the current weights.
    """

    model: ScorerModel | None = None
    frozen_version: Literal[0] | None = None

    async def open(self, services: ScorerServices) -> None:
        """Prepares for the first group of a run."""

    async def close(self) -> None:
        """Frees the resources of `open` and `score`. Called once, after the last group."""

    @abstractmethod
    async def score(self, group: RolloutGroup, services: ScorerServices) -> Scores:
        """Returns a score for every rollout of the group.

        Called for many groups at once. An attempt may take up to ``algorithm.group_scorer_timeout_seconds``. It fails
        if the call raises an exception, or if a score is missing, is not a finite number, or is for a rollout outside
        the group. After ``algorithm.group_scorer_attempts`` failed attempts, all rollouts of the group are unscored.
        An unscored rollout is not trained, and never has a reward of 0.

        Raises:
            Unscorable: If no rollout can be scored. They are then unscored without another attempt.
            rllm_core.errors.UserError: If only the user can fix the problem; ends the run.
        """


def checked_scores(returned: object, group: RolloutGroup) -> dict[str, Score | None]:
    """Returns the score of every rollout of the group.

    Raises:
        Unscorable: If no rollout has a score.
        ValueError: If a score is missing, it or a part is not a finite number, or there are scores for other rollouts.
    """
    if not isinstance(returned, Mapping):
        raise ValueError(f"score() returned {type(returned).__name__}, not a mapping from rollout ids to scores")
    wanted = [episode.rollout_id for episode in group.episodes]
    missing = [rollout for rollout in wanted if rollout not in returned]
    if missing:
        raise ValueError(
            f"score() returned no score of rollout {missing[0]!r}; return None for a rollout that cannot be scored"
        )
    unknown = [rollout for rollout in returned if rollout not in wanted]
    if unknown:
        raise ValueError(f"score() returned a score of rollout {unknown[0]!r:.80}, which is not in the group")
    scores = {rollout: _number(returned[rollout], rollout) for rollout in wanted}
    if all(score is None for score in scores.values()):
        raise Unscorable("score() returned None for each of them")
    return scores


def _number(score: object, rollout: str) -> Score | None:
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, Real) or not abs(score) <= MAX_REWARD:  # type: ignore[operator]
        raise ValueError(
            f"score() returned {score!r:.80} for rollout {rollout!r}; return a finite number up to {MAX_REWARD:g}, "
            "or None"
        )
    found = score if isinstance(score, Score) else Score(float(score))
    for name, part in found.parts.items():
        is_recordable = isinstance(part, str) or (isinstance(part, int | float) and abs(part) <= MAX_METRIC)
        if not name or not is_recordable:
            raise ValueError(
                f"score() returned the part {(name, part)!r:.80}; a part has a name, and is text or a finite number "
                f"up to {MAX_METRIC:g}"
            )
    return found
