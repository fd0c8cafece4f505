"""Reporting of a run: events, metrics, timings, trajectories and progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.run_folder import answers_table
from rllm_core.run_folder.first_failures import FirstFailures
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.groups import RecordedGroup
from rllm_core.run_folder.metrics import CORE_METRICS, MetricsAggregator, record_step, record_teacher
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.results import ConsumedGroup, ValidationResult
from rllm_core.run_folder.tracking import Trackers
from rllm_core.types import Episode, TrainingSample

POSITION = ("step", "epoch", "weight_version")  # with which each line of metrics starts


class Reporter:
    """Writes the lines of a run folder, and reports to the progress display and trackers."""

    def __init__(self, config: RunConfig, run_dir: RunDir, progress: Progress, trackers: Trackers) -> None:
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self.trackers = trackers
        self.metrics = MetricsAggregator(CORE_METRICS)
        self.failures = FirstFailures()
        self._unscored = False  # whether any group could not be scored
        self._named_roles = set(config.algorithm.roles)  # from the run file; cleared after the check

    def event(self, event: str, **fields: Any) -> None:
        """Appends an event to ``events.jsonl``."""
        self.run_dir.lines["events"].write({"event": event, **fields})

    def rollout_started(self, rollout: str, group: int, index: int, attempt: int) -> None:
        """Records the start of a rollout attempt."""
        # Formatted by hand for speed: a run has hundreds of thousands of these lines, whose fields need no escaping.
        self.run_dir.lines["events"].write_text(
            f'{{"event":"start","rollout":"{rollout}","group":{group},"index":{index},"attempt":{attempt}}}'
        )

    def rollout_finished(self, episode: Episode) -> None:
        """Records the end of a rollout attempt."""
        self.event("finish", **_outcome(episode))
        if episode.error is not None:
            self._error(episode)
            self.progress.problem(episode)

    def scored(self, group: int, task_id: str, rewards: Mapping[str, float | None], error: str | None) -> None:
        """Records the rewards from the group scorer; ``error`` is the reason if it could not score the group."""
        self.event("score", group=group, rewards=rewards, **({} if error is None else {"error": error}))
        if error is not None:
            self.unscored(task_id, error)

    def unscored(self, task_id: str, error: str) -> None:
        """Records that the group scorer could not score the rollouts of a task."""
        if not self._unscored:
            self.progress.note(f"the rollouts of task {task_id!r} are unscored: {error}")
        self._unscored = True
        self.failures.add("unscored", error, "group scorer", task_id)

    def difficulty(self, shares: Mapping[str, float]) -> None:
        """Records the result of `rllm_core.run_folder.difficulty.Difficulty.take` for an optimizer step."""
        for name, share in shares.items():
            self.metrics.record(name, share)

    def trained(
        self,
        consumed: Sequence[ConsumedGroup],
        samples: Sequence[TrainingSample],
        backend_metrics: Mapping[str, float],
        weight_version: int,
    ) -> None:
        """Records the metrics of an optimizer step; ``weight_version`` is the version before it."""
        self._look_for_roles({group.role for item in consumed for group in item.groups})
        record_step(self.metrics, consumed, samples, weight_version)
        if self.config.teacher.engine:
            record_teacher(self.metrics, consumed)
        for name, value in backend_metrics.items():
            if name in CORE_METRICS or name in POSITION:
                raise RunError(
                    f"backend {self.config.backend!r} reports metric {name!r}, a name of the core; rename it"
                )
            self.metrics.record(name, value, reduction="last")

    def _look_for_roles(self, found: set[str]) -> None:
        """Notes configured roles that are missing from the first trained groups; roles are known only now."""
        if not found:
            return  # all groups were filtered
        for role in sorted(self._named_roles - found):
            self.progress.note(
                f"algorithm.roles.{role} matches no group so far: the first groups have roles "
                f"{', '.join(sorted(found))}"
            )
        self._named_roles = set()

    def step(
        self, step: int, weight_version: int, consumed: Sequence[ConsumedGroup], pace: Mapping[str, float | None]
    ) -> dict[str, float]:
        """Writes the lines of an optimizer step; returns its metrics. ``pace`` comes from `Pace.end_step`."""
        epoch = max(item.epoch for item in consumed)
        metrics = dict(zip(POSITION, (step, epoch, weight_version), strict=True)) | self.metrics.flush()
        rate = metrics["sampled_tokens"] / max(pace["step_seconds"] or 0.0, 1e-9)
        timings = {"step": step, **pace, "tokens_per_second": rate}
        self.run_dir.lines["metrics"].write(metrics)
        self.run_dir.lines["timings"].write(timings)
        self._keep(step, [episode for item in consumed for episode in item.episodes])
        self.progress.step(metrics, timings)
        self.trackers.log_step(metrics, timings)
        return metrics

    def answers(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        """Sends the table of a step's sampled answers to the trackers, if it is due."""
        if answers_table.is_due(self.config.training.answers_table_every_steps, step):
            self.trackers.log_answers(step, groups)

    def validated(
        self, result: ValidationResult, episodes: Sequence[Episode], retried: Sequence[Episode]
    ) -> dict[str, float]:
        """Writes the lines of a validation and of failed attempts that were retried; returns its metrics."""
        for episode in (*retried, *episodes):
            if episode.error is not None:
                self._error(episode)
                self.progress.problem(episode)
        self.event("validation", **result.to_dict(), episodes=[_outcome(episode) for episode in episodes])
        self._keep(result.step, episodes)
        self.progress.validated(result)
        return self.trackers.log_validation(result)

    def _error(self, episode: Episode) -> None:
        self.failures.rollout(episode)
        self.event("error", rollout=episode.rollout_id, task=episode.task_id, error=episode.error)

    def _keep(self, step: int, episodes: Sequence[Episode]) -> None:
        """Writes some complete episodes, evenly spaced."""
        wanted = min(self.config.training.trajectories_per_step, len(episodes))
        for number in range(wanted):
            episode = episodes[number * len(episodes) // wanted]
            self.run_dir.lines["trajectories"].write_text(f'{{"step":{step},"episode":{episode.to_json()}}}')


def _outcome(episode: Episode) -> dict[str, Any]:
    """Returns the outcome of a rollout as fields of an event.

    ``rllm-core verify`` checks metrics against this outcome, which is written when the rollout ends, before other code
    can change the episode.
    """
    trajectories = []
    for trajectory in episode.trajectories:
        if trajectory.trainable:
            steps = trajectory.steps
            versions = [step.weight_version for step in steps if step.weight_version is not None]
            trajectories.append(
                {
                    "role": trajectory.role,
                    "reward": trajectory.total_reward if trajectory.has_reward else None,
                    "turns": len(steps),
                    "tokens": sum([step.completion_tokens for step in steps]),
                    "weight_version": min(versions, default=None),
                }
            )
    return {
        "rollout": episode.rollout_id,
        "reason": episode.termination_reason.value,
        "weight_version": episode.weight_version,
        "is_correct": episode.is_correct,
        "trajectories": trajectories,
    }
