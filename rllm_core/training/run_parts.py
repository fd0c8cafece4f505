"""The parts of a run, in one object that every part of the loop gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rllm_core.algorithms.group_scorer import GroupScorer
from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_core.assembly.algorithm import Algorithm, passes
from rllm_core.assembly.tasks import Tasks
from rllm_core.backend import BackendProtocol, Capabilities
from rllm_core.config import RunConfig
from rllm_core.distillation.teacher import Teacher
from rllm_core.engine import RolloutEngine
from rllm_core.events import TrainerState
from rllm_core.hosts.contract import RolloutHost
from rllm_core.observers import REMARKS, Observers
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.reporting import Reporter
from rllm_core.run_folder.results import ValidationResult
from rllm_core.run_folder.tracking import Trackers
from rllm_core.training.buffer import GroupBuffer
from rllm_core.training.costs import Budget, Costs
from rllm_core.training.draws import TaskDraws
from rllm_core.training.garbage import YoungGarbage
from rllm_core.training.group import GroupRules
from rllm_core.training.ledger import Ledger
from rllm_core.training.pace import Pace
from rllm_core.training.recording import Recording
from rllm_core.training.rollouts import RolloutRunner
from rllm_core.training.scoring import Scoring
from rllm_core.training.staleness_limit import SyncCoordinator
from rllm_core.workflow import Workflow


@dataclass
class Position:
    """Progress of a run.

    Attributes:
        step: Optimizer steps done.
        synced_step: Step whose weights are live in the engine.
        validations: Validation results so far.
        epoch: Pass over the training tasks of the last group that was started, from 0; -1 before the first group.
    """

    step: int = 0
    synced_step: int = 0
    validations: list[ValidationResult] = field(default_factory=list)
    epoch: int = -1

    @classmethod
    def saved_in(cls, manifest: dict[str, Any] | None) -> Position:
        """Returns the position saved in a manifest; the initial one if there is none."""
        if manifest is None:
            return cls()
        validations = [ValidationResult(**validation) for validation in manifest["validations"]]
        return cls(manifest["step"], manifest["synced_step"], validations, manifest["generation"]["epoch"])


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run. Parts that are derived from the others are built on first use.

    Attributes:
        sampler: Task sampler, already started with the training tasks.
        backend: Backend whose calls have timeouts (`rllm_core.limits.backend_timeouts.with_timeouts`).
        engine: Engine that the backend's ``init_rollout_engine`` returned.
        scorer_engine: Engine of the scorer's own model, or None.
        waits_for_others: Whether rollouts wait for others, see `rllm_core.providers.WorkflowProvider`.
    """

    config: RunConfig
    host: RolloutHost
    tasks: Tasks
    sampler: TaskSampler
    backend: BackendProtocol[Any]
    engine: RolloutEngine
    algorithm: Algorithm
    observers: Observers
    run_dir: RunDir
    progress: Progress
    trackers: Trackers
    teacher: Teacher | None = None
    scorer: GroupScorer | None = None
    scorer_engine: RolloutEngine | None = None
    waits_for_others: bool = False

    @property
    def workflow(self) -> Workflow:
        """Workflow of the run."""
        return self.host.hosted.workflow

    @cached_property
    def capabilities(self) -> Capabilities:
        """Capabilities of the backend in this run."""
        return self.backend.capabilities(self.config)

    @cached_property
    def passes(self) -> tuple[int, int]:
        """Groups per forward-backward pass, and groups that training waits for at once."""
        return passes(self.config, self.capabilities, self.algorithm)

    @cached_property
    def position(self) -> Position:
        """Progress of the run, from the resumed checkpoint if there is one."""
        return Position.saved_in(self.run_dir.manifest)

    @cached_property
    def reporter(self) -> Reporter:
        """Writes events and metrics."""
        return Reporter(self.config, self.run_dir, self.progress, self.trackers)

    @cached_property
    def coordinator(self) -> SyncCoordinator:
        """Admits groups and tracks weight versions."""
        training = self.config.training
        return SyncCoordinator(
            window_quota=self.config.window_quota, groups_needed=training.steps * training.groups_per_step
        )

    @cached_property
    def buffer(self) -> GroupBuffer:
        """Keeps complete groups until they are trained."""
        training, algorithm = self.config.training, self.config.algorithm
        rules = GroupRules(
            self.algorithm.estimators,
            drop_uniform=algorithm.filter_uniform_groups,
            refill=algorithm.refill_filtered_groups,
            group_of=self.workflow.group_of,
            leave_out=frozenset(algorithm.filter_termination_reasons),
        )
        return GroupBuffer(
            rules,
            in_order=training.staleness == "strict",
            max_bytes=training.buffer_max_bytes,
            spill=self.run_dir.path / "spill" if training.buffer_spill else None,
        )

    @cached_property
    def ledger(self) -> Ledger:
        """Records what happens to every group."""
        _, per_take = self.passes
        rollouts = self.config.training.rollouts_per_group
        return Ledger(self.coordinator, self.buffer, self.reporter, rollouts_per_group=rollouts, per_take=per_take)

    @cached_property
    def stream(self) -> TaskDraws:
        """Training tasks in the order in which they are started."""
        return TaskDraws(self.sampler, self.tasks.of("train"))

    @cached_property
    def recording(self) -> Recording:
        """Records whole groups."""
        return Recording(
            self.config, self.algorithm, self.run_dir, self.stream.__getitem__, self.engine.parser, self.progress.note
        )

    @cached_property
    def garbage(self) -> YoungGarbage:
        """Collects what answers leave behind."""
        return YoungGarbage()

    @cached_property
    def runner(self) -> RolloutRunner:
        """Runs the workflow."""
        lockstep = self.capabilities.colocated and self.capabilities.deterministic and not self.waits_for_others
        estimators = self.algorithm.estimators
        return RolloutRunner(
            self.host,
            self.engine,
            self.config,
            lockstep=lockstep,
            estimators=estimators,
            teacher=self.teacher,
            garbage=self.garbage,
        )

    @cached_property
    def scoring(self) -> Scoring | None:
        """Scores groups, or None if workflows give the rewards."""
        return None if self.scorer is None else Scoring(self.scorer, self.runner, self.scorer_engine, self.config)

    @cached_property
    def costs(self) -> Costs:
        """Costs of the run so far; must be built before anything is spent."""
        return Costs(self.config.costs, self.run_dir)

    @cached_property
    def budget(self) -> Budget:
        """Decides whether rollouts may start."""
        return Budget(self.costs)

    @cached_property
    def pace(self) -> Pace:
        """Measures the time that steps take."""
        colocated = self.capabilities.colocated
        return Pace(self.config, self.runner.slots, self.coordinator, self.buffer, self.scoring, colocated=colocated)

    def state(self) -> TrainerState:
        """Returns a snapshot for hooks."""
        return TrainerState(
            config=self.config,
            run_dir=self.run_dir.named,
            incarnation=self.run_dir.incarnation,
            step=self.position.step,
            weight_version=self.coordinator.weight_version,
            epoch=max(self.position.epoch, 0),
        )

    async def notify(self, hook: str, **arguments: Any) -> None:
        """Calls the observers of an event hook, with the run's state and ``arguments``."""
        await self.observers.notify(hook, state=self.state(), **arguments)

    async def remark(self, metrics: Mapping[str, float]) -> None:
        """Shows the observers' remarks about the run so far."""
        if self.observers.active(REMARKS):
            books = self.ledger.books.by_reason()
            for line in await self.observers.lines(REMARKS, state=self.state(), metrics=metrics, books=books):
                self.progress.note(line)
