"""Training loop.

Generation starts whole groups when the coordinator admits them; training consumes complete groups. Synchronous
training is the same loop with a sync window of one step. One optimizer step does, in order::

    on_batch_start
      advantages of the step's groups
      per pass:  transform_to_backend_batch -> process_backend_batch
      update_policy                                  (counts the groups as trained)
      if a weight sync is due:
        wait for running rollouts unless partial_rollout
        backend.on_policy_updated(update) -> version published -> hook on_policy_updated
    on_batch_end
    validation, checkpoint, if due
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rllm_core.assembly.algorithm import Algorithm
from rllm_core.assembly.tasks import Tasks, TaskStream
from rllm_core.backend import BackendProtocol, Capabilities, OptimizerStep, Policy, UpdateResult
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import RunError, UserError
from rllm_core.events import TrainerState
from rllm_core.limits.timeouts import stop, watch, within
from rllm_core.observers import Observers
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.reporting import Reporter
from rllm_core.run_folder.results import ValidationResult
from rllm_core.run_folder.tracking import Trackers
from rllm_core.training.books import Books
from rllm_core.training.buffer import CompleteGroup, TrajectoryGroupBuffer
from rllm_core.training.coordinator import SyncCoordinator
from rllm_core.training.crediting import Crediting
from rllm_core.training.generation import Generation
from rllm_core.training.pace import Pace
from rllm_core.training.rollouts import Rollout, RolloutRunner
from rllm_core.training.saving import Position, Saving
from rllm_core.training.validation import (
    nll_per_token,
    plan,
    play_all,
    summarise,
    written_samples,
)
from rllm_core.training.weights import Weights
from rllm_core.types import Episode, Floats, TrainingSample
from rllm_core.workflow import Workflow

if TYPE_CHECKING:
    from rllm_core.distillation.teacher import Teacher

ResultT = TypeVar("ResultT")


class Interrupted(UserError):
    """A signal stopped the run after it saved a checkpoint."""

    label = ""  # not an error of the run

    def __init__(self, signal_number: int, signal_name: str) -> None:
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = 128 + signal_number


def passes(config: RunConfig, capabilities: Capabilities, algorithm: Algorithm) -> tuple[int, int]:
    """Returns groups per forward-backward pass, and groups to wait for before the first pass of a step.

    A backend that cannot normalize the loss after the passes gets a step in one pass. An estimator that needs the whole
    batch, or a backend that shares its devices with the engine, waits for all groups of a step.
    """
    whole = config.training.groups_per_step
    per_pass = config.groups_per_pass if capabilities.deferred_normalisation else whole
    per_take = whole if capabilities.colocated or algorithm.estimators.scope == "batch" else per_pass
    return per_pass, per_take


class Trainer:
    """Runs one training; not reusable.

    Args:
        config: Resolved run file.
        workflow: Workflow to run.
        tasks: Tasks for training and validation.
        backend: Backend, after `rllm_core.backend.BackendProtocol.init_rollout_engine`.
        engine: Engine that this call returned.
        algorithm: Advantage estimators, loss and corrections.
        observers: Plugins' event hooks.
        run_dir: Run folder.
        progress: Progress display.
        trackers: Trackers that receive the metrics.
        teacher: Teacher that scores rollouts, or None.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        workflow: Workflow,
        tasks: Tasks,
        backend: BackendProtocol[Any],
        engine: RolloutEngine,
        algorithm: Algorithm,
        observers: Observers,
        run_dir: RunDir,
        progress: Progress,
        trackers: Trackers,
        teacher: Teacher | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.observers = observers
        self.run_dir = run_dir
        self.progress = progress
        self.reporter = Reporter(config, run_dir, progress, trackers)
        self.books = Books()
        self.position = Position()
        training, capabilities = config.training, type(backend).capabilities(config)
        self.crediting = Crediting(
            config, algorithm, self._compute_logprobs, forward_is_proximal=capabilities.forward_is_proximal
        )
        self.colocated = capabilities.colocated
        self.groups_per_pass, self.groups_per_take = passes(config, capabilities, algorithm)
        self.runner = RolloutRunner(
            workflow,
            engine,
            config,
            observers,
            lockstep=capabilities.colocated and capabilities.deterministic,
            needs_reward=lambda group: algorithm.estimators.of(group).needs_rewards,
            teacher=teacher,
            needs_teacher=lambda group: algorithm.estimators.of(group).needs_teacher,
        )
        self.learns_written = algorithm.estimators.learns_written
        validated = tasks.of("validation") if training.validation_rollouts else ()
        self.validation_plan = plan(validated, training.validation_rollouts, samples=workflow.samples)
        self.coordinator = SyncCoordinator(
            window_quota=config.window_quota, groups_needed=training.steps * training.groups_per_step
        )
        self.buffer = TrajectoryGroupBuffer(
            algorithm.estimators,
            credits_groups=Crediting.when_completed(config, algorithm),
            drop_uniform=config.algorithm.filter_uniform_groups,
            refill=config.algorithm.refill_filtered_groups,
            in_order=training.staleness == "strict",
            group_of=workflow.group_of,
            leave_out=config.algorithm.filter_termination_reasons,
            max_bytes=training.buffer_max_bytes,
            spill=run_dir.path / "spill" if training.buffer_spill else None,
        )
        self.generation = Generation(
            config=config,
            runner=self.runner,
            stream=TaskStream(tasks.of("train"), training.seed),
            coordinator=self.coordinator,
            buffer=self.buffer,
            books=self.books,
            reporter=self.reporter,
            observers=observers,
            state=self.state,
            incarnation=run_dir.incarnation,
            groups_per_take=self.groups_per_take,
        )
        self.pace = Pace(
            config,
            colocated=self.colocated,
            slots=self.runner.slots,
            coordinator=self.coordinator,
            buffer=self.buffer,
        )
        self.weights = Weights(
            config=config,
            backend=backend,
            engine=engine,
            colocated=self.colocated,
            coordinator=self.coordinator,
            reporter=self.reporter,
            observers=observers,
            pace=self.pace,
            state=self.state,
            idle=self.runner.idle,
        )
        self.saving = Saving(
            config=config,
            run_dir=run_dir,
            backend=backend,
            coordinator=self.coordinator,
            buffer=self.buffer,
            generation=self.generation,
            books=self.books,
            reporter=self.reporter,
            observers=observers,
            state=self.state,
        )
        self._interrupt: Interrupted | None = None
        self._validating: asyncio.Task[list[Rollout]] | None = None
        self._consumed: list[CompleteGroup] = []  # groups of the current optimizer step

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.position.step

    @property
    def validations(self) -> list[ValidationResult]:
        """Results so far."""
        return self.position.validations

    # ----------------------------------------------------------------------------------------------------------------
    # Life cycle

    async def run(self) -> None:
        """Trains until the planned steps are done.

        Raises:
            Interrupted: After `interrupt`; a checkpoint has been saved.
            RunError: If rollout accounting is inconsistent, the run stalls, or too many groups are filtered.
        """
        status = "failed"
        try:
            self.position = Position.saved_in(self.run_dir.manifest)
            await self.saving.resume()
            restored = self.buffer.ordinals()
            self.reporter.event(
                "begin",
                incarnation=self.run_dir.incarnation,
                step=self.step,
                restored=restored,
                trajectories_per_step=self.config.training.trajectories_per_step,
            )
            await self.observers.notify("on_train_start", state=self.state())
            await self.weights.publish(self.position, "resume" if self.run_dir.resumed else "start")
            self.progress.watch(self.pace.now)
            if self._is_validation_due():  # also if the previous launch was interrupted during it
                await self._validate()
            await self._run_halves()
            self._check_books()
            if self.step < self.config.training.steps:
                raise RunError(f"{self.step} of {self.config.training.steps} planned steps were trained")
            status = "completed"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self.generation.discard("run_failed")  # groups of a checkpoint, if the launch failed before training them
            await self.runner.aclose()
            await self.observers.notify("on_train_end", state=self.state(), status=status)

    def interrupt(self, error: Interrupted) -> None:
        """Stops the run without loss: generation and validation immediately, training after the current step."""
        self._interrupt = error
        self.buffer.fail(error)
        if self._validating is not None:
            self._validating.cancel()

    def state(self) -> TrainerState:
        """Returns a snapshot for hooks."""
        return TrainerState(
            config=self.config,
            run_dir=self.run_dir.path,
            incarnation=self.run_dir.incarnation,
            step=self.step,
            weight_version=self.coordinator.weight_version,
            epoch=max(self.generation.epoch, 0),
        )

    async def _backend(self, method: str, call: Awaitable[ResultT]) -> ResultT:
        limit = self.config.training.backend_timeout_seconds
        return await within(limit, f"{method} of backend {self.config.backend!r}", call)

    async def _run_halves(self) -> None:
        """Runs generation, training and the watchdog concurrently; if one fails, the run fails."""
        self.pace.begin()
        training = asyncio.create_task(self._train(), name="training")
        generation = asyncio.create_task(self.generation.run(), name="generation")
        watchdog = asyncio.create_task(
            watch(
                lambda: self.coordinator.progress,
                self.config.training.stall_timeout_seconds,
                lambda: f"after step {self.step}; {self.generation.whereabouts()}",
            ),
            name="watchdog",
        )
        waiting = {training, generation, watchdog}
        try:
            while training in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except BaseException as error:
            interrupted = isinstance(error, Interrupted)
            # Stop dispatching before recording outstanding rollouts: generation would refill the space they free in the
            # window.
            await stop(training, generation, watchdog)
            reason = "interrupted" if interrupted else "run_failed"
            await self.generation.stop(reason)
            self.generation.give_back(self._consumed)
            try:
                if interrupted:
                    self._check_books()
                    await self._save_checkpoint()
            finally:
                self.generation.discard(reason)
            raise
        finally:
            await stop(training, generation, watchdog)

    # ----------------------------------------------------------------------------------------------------------------
    # Training

    async def _train(self) -> None:
        training = self.config.training
        while self.step < training.steps:
            await self._train_step(self.step + 1)
            last = self.step == training.steps
            if self._is_validation_due():
                await self._validate()
            if last or (training.checkpoint_every_steps and self.step % training.checkpoint_every_steps == 0):
                await self._save_checkpoint()
            if self._interrupt is not None and not last:
                raise self._interrupt

    async def _train_step(self, step: int) -> None:
        training = self.config.training
        consumed = self._consumed = []
        self.pace.begin_step()
        taken = await self._take()
        await self.observers.notify("on_batch_start", state=self.state(), step=step)
        if self.colocated:
            await self.weights.drained()
            await self._backend("enter_training", self.backend.enter_training())
        samples: list[TrainingSample] = []
        while True:
            with self.pace.spending("training"):
                samples += await self._process(taken)
            if len(consumed) == training.groups_per_step:
                break
            taken = await self._take()
        planned = OptimizerStep(
            step=step,
            total_steps=training.steps,
            samples=len(samples),
            sampled_tokens=sum(sample.sampled_tokens for sample in samples),
            trajectories=sum(len(group.trajectories) for item in consumed for group in item.groups),
        )
        # No samples, no update: Adam's state from earlier steps would still move the weights.
        update = self.backend.update_policy(planned) if samples else None
        with self.pace.spending("training"):
            result = UpdateResult() if update is None else await self._backend("update_policy", update)
        self.position.step, self._consumed = step, []
        self.generation.groups_since_step = 0
        for item in consumed:
            for account, reason, rollouts in item.accounts:
                self.books.book(account, reason, rollouts)
        self.reporter.event(
            "step",
            step=step,
            groups=[item.ordinal for item in consumed],
            trajectories=planned.trajectories,
            samples=planned.samples,
            sampled_tokens=planned.sampled_tokens,
        )
        self.reporter.difficulty(self.generation.difficulty.take(item.episodes for item in consumed))
        known = {**result.metrics, **self.crediting.diagnostics.flush()}
        self.reporter.trained(consumed, samples, known, self.coordinator.weight_version)
        if step % training.trigger_parameter_sync_step == 0 or step == training.steps:
            await self.weights.synchronise(self.position)
        elif self.colocated:
            await self._backend("enter_generation", self.backend.enter_generation())
        self._check_books()
        metrics = self.reporter.step(step, self.coordinator.weight_version, consumed, self.pace.end_step())
        await self.observers.notify("on_batch_end", state=self.state(), step=step, metrics=metrics)

    async def _take(self) -> list[CompleteGroup]:
        with self.pace.spending("generation_wait"):
            taken = await self.buffer.take(self.groups_per_take)
        self.coordinator.on_consumed(len(taken))
        self.coordinator.throttle(self.buffer.is_full and len(self.buffer) >= self.groups_per_take)
        self._consumed += taken
        groups, version = [item.ordinal for item in taken], self.coordinator.weight_version
        self.reporter.event("consume", groups=groups, weight_version=version)
        return taken

    async def _process(self, taken: Sequence[CompleteGroup]) -> list[TrainingSample]:
        """Computes advantages and samples of the groups, then runs the forward-backward passes."""
        training, trained = self.config.training, []
        since_sync = (self.step - self.position.synced_step) / training.trigger_parameter_sync_step
        credited = await self.crediting.credited(taken, weight_version=self.coordinator.weight_version)
        for start in range(0, len(credited), self.groups_per_pass):
            chunk = [sample for group in credited[start : start + self.groups_per_pass] for sample in group]
            if not chunk:
                continue  # all groups of this pass were filtered
            chunk = await self.crediting.corrected(chunk, proximal_version=self.coordinator.weight_version + since_sync)
            batch = self.backend.transform_to_backend_batch(chunk)
            await self._backend("process_backend_batch", self.backend.process_backend_batch(batch))
            self.coordinator.touch()
            trained += chunk
        return trained

    async def _compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy) -> list[Floats]:
        computed = await self._backend("compute_logprobs", self.backend.compute_logprobs(samples, policy))
        self.coordinator.touch()
        return computed

    # ----------------------------------------------------------------------------------------------------------------
    # Validation

    def _is_validation_due(self) -> bool:
        """Whether the weights of this step need validation and have not been validated."""
        training = self.config.training
        every = training.validate_every_steps
        wanted = self.step in (0, training.steps) or bool(every and self.step % every == 0)
        return wanted and bool(self.validation_plan) and all(done.step != self.step for done in self.validations)

    async def _validate(self) -> None:
        await self.observers.notify("on_validation_start", state=self.state(), step=self.step)
        self.progress.validating(self.step, len(self.validation_plan))
        rollouts = await self._play_validation()
        self.coordinator.touch()
        episodes = [rollout.episode for rollout in rollouts]
        failed = [episode for rollout in rollouts for episode in rollout.failed]
        nll = await self._nll_per_token(episodes) if self.learns_written else None
        version = self.coordinator.weight_version
        result = summarise(episodes, step=self.step, weight_version=version, nll=nll, retries=len(failed))
        self.validations.append(result)
        if self.observers.active("on_episode_finished"):
            for episode in episodes:
                await self.observers.notify("on_episode_finished", state=self.state(), episode=episode)
        metrics = self.reporter.validated(result, episodes, failed)
        await self.observers.notify("on_validation_end", state=self.state(), step=self.step, metrics=metrics)

    async def _play_validation(self) -> list[Rollout]:
        if self._interrupt is not None:
            raise self._interrupt
        self._validating = asyncio.create_task(play_all(self.runner, self.validation_plan, "validation"))
        try:
            return await self._validating
        except asyncio.CancelledError:
            if self._interrupt is not None:
                raise self._interrupt from None
            raise
        finally:
            self._validating = None

    async def _nll_per_token(self, episodes: Sequence[Episode]) -> float | None:
        """Computes the negative log-likelihood of the target tokens under the current weights."""
        if self.colocated:
            self.coordinator.pause()
            await self.weights.drained()
            await self._backend("enter_training", self.backend.enter_training())
        samples = written_samples(episodes)
        logprobs: list[Floats] = []
        for start in range(0, len(samples), self.config.training.groups_per_step):
            part = samples[start : start + self.config.training.groups_per_step]
            logprobs += await self._compute_logprobs(part, "current")
        if self.colocated:
            await self._backend("enter_generation", self.backend.enter_generation())
            self.coordinator.resume()
        return nll_per_token(logprobs)

    # ----------------------------------------------------------------------------------------------------------------
    # Rollout accounting and checkpoints

    def _check_books(self) -> None:
        self.books.check(self.coordinator.outstanding * self.config.training.rollouts_per_group)

    async def _save_checkpoint(self) -> None:
        folder = await self.saving.save(self.position)
        if folder is not None:
            await self.observers.notify("on_checkpoint_saved", state=self.state(), step=self.step, directory=folder)
