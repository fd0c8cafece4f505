"""The one training loop.

Generation dispatches whole groups as the coordinator admits them; training consumes complete groups. Synchronous
training is the same loop with a window of one step. One optimizer step, in order::

    on_batch_start
      advantages of the step's groups
      per pass:  transform_to_backend_batch -> process_backend_batch
      update_policy                                  (books the groups as trained)
      if a synchronisation is due:
        drain generation unless partial_rollout
        backend.on_policy_updated(update) -> version published -> hook on_policy_updated
    on_batch_end
    validation, checkpoint, if due
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.samples import training_samples
from rllm_core.backend import BackendProtocol, Capabilities, OptimizerStep, PolicyUpdate
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import RunError, StallError, UserError
from rllm_core.observers import Observers
from rllm_core.training import checkpoint
from rllm_core.training.books import Books
from rllm_core.training.buffer import Assembly, CompleteGroup, TrajectoryGroupBuffer
from rllm_core.training.coordinator import SyncCoordinator
from rllm_core.training.metrics import CORE_METRICS, MetricsAggregator, Trackers
from rllm_core.training.progress import Progress
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.training.run_dir import RunDir
from rllm_core.training.state import TrainerState
from rllm_core.training.tasks import TaskStream, spread
from rllm_core.training.validation import ValidationResult, play_all, summarise
from rllm_core.types import Episode, Task, TrainingSample
from rllm_core.workflow import Workflow

logger = logging.getLogger(__name__)


class Interrupted(UserError):
    """The run was asked to stop by a signal; it has saved what it had."""

    def __init__(self, signal_number: int, signal_name: str) -> None:
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = 128 + signal_number


def passes(config: RunConfig, capabilities: Capabilities, estimator: AdvantageEstimator) -> tuple[int, int]:
    """Groups per forward-backward pass, and groups that are waited for before the first pass of a step.

    A backend that cannot divide by counts known only at the end gets a step in one pass. An estimator that needs the
    whole batch, and a backend that shares its devices with the engine, wait for all groups of a step.
    """
    whole = config.training.groups_per_step
    per_pass = config.groups_per_pass if capabilities.deferred_normalisation else whole
    per_take = whole if capabilities.colocated or estimator.scope == "batch" else per_pass
    return per_pass, per_take


class Trainer:
    """Runs one training, once.

    Args:
        config: The resolved run file.
        workflow: What is played.
        backend: Who trains; `rllm_core.backend.BackendProtocol.init_rollout_engine` has been called.
        engine: What that call returned.
        estimator: Advantages.
        observers: Hooks.
        run_dir: Where everything is written.
        progress: Who is told how it goes.
        trackers: Where metrics are sent.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        workflow: Workflow,
        backend: BackendProtocol[Any],
        engine: RolloutEngine,
        estimator: AdvantageEstimator,
        observers: Observers,
        run_dir: RunDir,
        progress: Progress,
        trackers: Trackers,
    ) -> None:
        self.config = config
        self.workflow = workflow
        self.backend = backend
        self.engine = engine
        self.estimator = estimator
        self.observers = observers
        self.run_dir = run_dir
        self.progress = progress
        self.trackers = trackers
        training = config.training
        capabilities = type(backend).capabilities(config)
        self.colocated = capabilities.colocated
        self.groups_per_pass, self.groups_per_take = passes(config, capabilities, estimator)
        self.runner = RolloutRunner(
            workflow, engine, config, observers, lockstep=capabilities.colocated and capabilities.deterministic
        )
        self.stream = TaskStream(workflow.tasks("train"), training.seed)
        self.validation_plan = spread(workflow.tasks("validation"), training.validation_rollouts)
        self.coordinator = SyncCoordinator(
            window_quota=config.window_quota, groups_needed=training.steps * training.groups_per_step
        )
        self.buffer = TrajectoryGroupBuffer(
            estimator,
            rollouts_per_group=training.rollouts_per_group,
            drop_uniform=config.algorithm.filter_uniform_groups,
        )
        self.books = Books()
        self.metrics = MetricsAggregator(CORE_METRICS)
        self.step = 0
        self.validations: list[ValidationResult] = []
        self.epoch = 0
        self._next_ordinal = 0
        self._epoch_begun = -1
        self._again: list[int] = []  # ordinals that were outstanding at the checkpoint this start resumed from
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._assemblies: dict[int, Assembly] = {}
        self._groups_since_step = 0
        self._interrupt: Interrupted | None = None
        self._checkpointed_step: int | None = None
        self._synced_step = 0

    # ----------------------------------------------------------------------------------------------------------------
    # Life cycle

    async def run(self) -> None:
        """Train until the planned steps are done.

        Raises:
            Interrupted: After `interrupt`; a checkpoint has been saved.
            RunError: If the books do not balance, nothing progresses, or too few groups survive filtering.
        """
        status = "failed"
        try:
            await self._resume()
            await self.observers.notify("on_train_start", state=self.state())
            await self._publish("resume" if self.run_dir.resumed else "start")
            await self._train_and_generate()
            self._check_books()
            if self.step < self.config.training.steps:
                raise RunError(f"{self.step} of {self.config.training.steps} planned steps were trained")
            status = "completed"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            await self.runner.aclose()
            self.run_dir.flush()
            await self.observers.notify("on_train_end", state=self.state(), status=status)

    def interrupt(self, error: Interrupted) -> None:
        """Stop at the next point where nothing is lost: at once while generating, after the step while training."""
        self._interrupt = error
        self.buffer.fail(error)

    def state(self) -> TrainerState:
        """What hooks see."""
        return TrainerState(
            config=self.config,
            run_dir=self.run_dir.path,
            incarnation=self.run_dir.incarnation,
            step=self.step,
            weight_version=self.coordinator.weight_version,
            epoch=self.epoch,
        )

    async def _train_and_generate(self) -> None:
        if self.step == 0 and not self.validations:
            await self._validate()
        generation = asyncio.create_task(self._generate(), name="generation")
        training = asyncio.create_task(self._train(), name="training")
        watchdog = asyncio.create_task(self._watch(), name="watchdog")
        try:
            waiting = {generation, training, watchdog}
            while training in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: task is not training):
                    task.result()  # a failure of any part is the failure of the run
        except Interrupted:
            await self._cancel_outstanding("interrupted")
            await self._save_checkpoint()
            raise
        except BaseException:
            await self._cancel_outstanding("run_failed")
            raise
        finally:
            for task in (generation, training, watchdog):
                task.cancel()
            await asyncio.gather(generation, training, watchdog, return_exceptions=True)

    async def _watch(self) -> None:
        """Turn no progress at all into an error that says where every rollout is."""
        limit = self.config.training.stall_timeout_seconds
        seen, since = self.coordinator.progress, time.monotonic()
        while True:
            await asyncio.sleep(min(limit / 10, 5.0))
            if self.coordinator.progress != seen:
                seen, since = self.coordinator.progress, time.monotonic()
            elif time.monotonic() - since > limit:
                raise StallError(f"nothing happened for {limit:g} s; {self._whereabouts()}")

    def _whereabouts(self) -> str:
        missing = [
            f"group {a.ordinal} (task {a.task_id}) waits for rollouts "
            + ", ".join(str(i) for i in range(a.expected) if i not in a.episodes)
            for a in list(self._assemblies.values())[:20]
        ]
        coordinator = self.coordinator
        return (
            f"step {self.step}, {coordinator.in_flight} groups in flight, {coordinator.buffered} complete, "
            f"{coordinator.consumed} consumed; " + ("; ".join(missing) or "no rollout is running")
        )

    # ----------------------------------------------------------------------------------------------------------------
    # Generation

    async def _generate(self) -> None:
        while await self.coordinator.admit():
            ordinal = self._again[0] if self._again else self._next_ordinal
            if not self._again and self.stream.position(ordinal) == 0 and self._epoch_begun < self.stream.epoch(ordinal):
                self.epoch = self._epoch_begun = self.stream.epoch(ordinal)
                await self.observers.notify("on_epoch_start", state=self.state(), epoch=self.epoch)
                continue  # the place may be gone: a synchronisation can have begun while the hooks ran
            self._check_attempts()
            if self._again:
                self._again.pop(0)
            else:
                self._next_ordinal += 1
            self._dispatch(ordinal)
            if self.stream.position(ordinal) == len(self.stream.tasks) - 1:
                await self.observers.notify("on_epoch_end", state=self.state(), epoch=self.stream.epoch(ordinal))

    def _check_attempts(self) -> None:
        self._groups_since_step += 1
        limit = self.config.algorithm.max_group_attempts * self.config.window_quota
        if self._groups_since_step > limit:
            raise RunError(
                f"{limit} groups were generated for step {self.step + 1} and too few survived filtering: "
                f"{self.books.by_reason()}; see algorithm.filter_uniform_groups and algorithm.max_group_attempts"
            )

    def _dispatch(self, ordinal: int) -> None:
        task, size = self.stream[ordinal], self.config.training.rollouts_per_group
        self.coordinator.on_dispatched()
        self.books.dispatch(size)
        self._event("dispatch", group=ordinal, task=task.task_id, rollouts=size)
        assembly = Assembly(ordinal, task.task_id, self.stream.epoch(ordinal), size)
        self._assemblies[ordinal] = assembly
        self._groups[ordinal] = asyncio.create_task(self._play_group(task, assembly), name=f"group {ordinal}")
        self._groups[ordinal].add_done_callback(self._group_ended)

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.buffer.fail(error)

    async def _play_group(self, task: Task, assembly: Assembly) -> None:
        """All rollouts of one task, to the buffer or to the books."""
        async with asyncio.TaskGroup() as rollouts:
            for index in range(assembly.expected):
                rollouts.create_task(self._play_rollout(task, assembly, index))
        outcome = self.buffer.close_group(assembly)
        del self._assemblies[assembly.ordinal], self._groups[assembly.ordinal]
        if isinstance(outcome, CompleteGroup):
            self._event("complete", group=assembly.ordinal, weight_version=outcome.weight_version)
            self.buffer.put(outcome)
            self.coordinator.on_completed()
            return
        failed = [episode for episode in assembly.episodes.values() if not episode.trajectories]
        for episode in failed:
            self.books.book("failed", episode.termination_reason.value)
        self.books.book("filtered", outcome.value, assembly.expected - len(failed))
        self._event("filter", group=assembly.ordinal, reason=outcome.value)
        self.coordinator.on_dropped()

    async def _play_rollout(self, task: Task, assembly: Assembly, index: int) -> None:
        for attempt in range(self.config.rollout.max_attempts):
            key = RolloutKey("train", assembly.ordinal, index, attempt, self.run_dir.incarnation)
            episode = await self.runner.run(task, key)
            self.coordinator.touch()
            self._rollout_finished(episode)
            if self.observers.active("on_episode_finished"):
                await self.observers.notify("on_episode_finished", state=self.state(), episode=episode)
            if not episode.termination_reason.is_failure:
                break
            if attempt + 1 < self.config.rollout.max_attempts:
                self.books.retries += 1
        assembly.add(episode)

    def _rollout_finished(self, episode: Episode) -> None:
        # Written by hand: a run has hundreds of thousands of these lines, of fields that need no escaping.
        self.run_dir.lines["events"].write_text(
            f'{{"event":"finish","rollout":"{episode.rollout_id}","reason":"{episode.termination_reason.value}"}}'
        )
        if episode.error is not None:
            self._event("error", rollout=episode.rollout_id, task=episode.task_id, error=episode.error)
            self.progress.problem(episode)

    # ----------------------------------------------------------------------------------------------------------------
    # Training

    async def _train(self) -> None:
        training = self.config.training
        while self.step < training.steps:
            await self._train_step(self.step + 1)
            last = self.step == training.steps
            if last or (training.validate_every_steps and self.step % training.validate_every_steps == 0):
                await self._validate()
            every = training.checkpoint_every_steps
            if last or (every and self.step % every == 0):
                await self._save_checkpoint()
            if self._interrupt is not None and not last:
                raise self._interrupt

    async def _train_step(self, step: int) -> None:
        started = time.monotonic()
        training = self.config.training
        taken = await self._take(self.groups_per_take)
        waited = time.monotonic() - started
        await self.observers.notify("on_batch_start", state=self.state(), step=step)
        if self.colocated:
            await self.coordinator.drained()
            await self.backend.enter_training()
        training_began = time.monotonic()
        consumed: list[CompleteGroup] = []
        samples: list[TrainingSample] = []
        while True:
            consumed += taken
            samples += await self._process(taken)
            if len(consumed) == training.groups_per_step:
                break
            before = time.monotonic()
            taken = await self._take(self.groups_per_take)
            waited += time.monotonic() - before
        result = await self.backend.update_policy(
            OptimizerStep(
                step=step,
                total_steps=training.steps,
                samples=len(samples),
                sampled_tokens=sum(sample.sampled_tokens for sample in samples),
                trajectories=sum(len(group.trajectories) for item in consumed for group in item.groups),
            )
        )
        self.step = step
        self._groups_since_step = 0
        self._book_trained(consumed)
        self._record(consumed, samples)
        for name, value in result.metrics.items():
            self.metrics.declare(name, "last")
            self.metrics.record(name, value)
        trained = time.monotonic()
        if step % training.trigger_parameter_sync_step == 0 or step == training.steps:
            await self._synchronise()
        elif self.colocated:
            await self.backend.enter_generation()
        self._check_books()
        ended = time.monotonic()
        await self._report(
            {
                "step_seconds": ended - started,
                "generation_wait_seconds": waited,
                "training_seconds": trained - training_began,
                "sync_seconds": ended - trained,
            },
            consumed,
        )

    async def _take(self, groups: int) -> list[CompleteGroup]:
        taken = await self.buffer.take(groups)
        self.coordinator.on_consumed(len(taken))
        return taken

    async def _process(self, taken: Sequence[CompleteGroup]) -> list[TrainingSample]:
        """Advantages and samples of what was taken, then forward and backward in passes."""
        samples: list[TrainingSample] = []
        passes: list[list[TrainingSample]] = []
        for position, (item, advantages) in enumerate(zip(taken, self._advantages(taken), strict=True)):
            if position % self.groups_per_pass == 0:
                passes.append([])
            for group, credit in zip(item.groups, advantages, strict=True):
                passes[-1] += training_samples(group, credit)
        for chunk in passes:
            samples += chunk
            await self.backend.process_backend_batch(self.backend.transform_to_backend_batch(chunk))
            self.coordinator.touch()
        return samples

    def _advantages(self, taken: Sequence[CompleteGroup]) -> list[list[list[npt.NDArray[np.float64]]]]:
        """Per task and group: computed when the group was completed, or now if they need the whole step."""
        if self.estimator.scope == "group":
            return [item.advantages or [] for item in taken]
        by_role: dict[str, list[tuple[int, int]]] = {}
        for position, item in enumerate(taken):
            for index, group in enumerate(item.groups):
                by_role.setdefault(group.role, []).append((position, index))
        result: list[list[list[npt.NDArray[np.float64]]]] = [[[] for _ in item.groups] for item in taken]
        for places in by_role.values():
            credits = self.estimator([taken[position].groups[index] for position, index in places])
            for (position, index), credit in zip(places, credits, strict=True):
                result[position][index] = credit
        return result

    def _book_trained(self, consumed: Sequence[CompleteGroup]) -> None:
        for item in consumed:
            self.books.book("trained", "trained", len(item.episodes))
        self._event("step", step=self.step, groups=[item.ordinal for item in consumed])

    async def _synchronise(self) -> None:
        if not self.config.training.partial_rollout:
            self.coordinator.pause()
            await self.coordinator.drained()
        await self._publish("step")
        self.coordinator.resume()

    async def _publish(self, reason: str) -> None:
        """New weights to the engine, then the version to everybody."""
        coordinator = self.coordinator
        version = coordinator.weight_version + (reason == "step" or self._synced_step != self.step)
        update = PolicyUpdate(version, self.step, reason)  # type: ignore[arg-type]
        await self.backend.on_policy_updated(update)
        if self.engine.weight_version != version:
            raise RunError(
                f"backend {self.backend.name!r} left its engine at weight version {self.engine.weight_version}, "
                f"not {version}, after on_policy_updated"
            )
        self._synced_step = self.step
        coordinator.on_synced(version)
        if self.colocated:
            await self.backend.enter_generation()
        self._event("sync", version=version, step=self.step, reason=reason)
        await self.observers.notify("on_policy_updated", update=update, state=self.state())

    # ----------------------------------------------------------------------------------------------------------------
    # Reporting

    def _record(self, consumed: Sequence[CompleteGroup], samples: Sequence[TrainingSample]) -> None:
        record = self.metrics.record
        record("groups", len(consumed))
        record("samples", len(samples))
        version = self.coordinator.weight_version
        for item in consumed:
            record("staleness_mean", version - item.weight_version)
            record("staleness_max", version - item.weight_version)
            for episode in item.episodes:
                if episode.is_correct is not None:
                    record("solved", episode.is_correct)
            for group in item.groups:
                rewards = [trajectory.total_reward for trajectory in group.trajectories]
                record("trajectories", len(rewards))
                record("uniform_groups_share", min(rewards) == max(rewards))
                record("trajectory_reward_min", min(rewards))
                record("trajectory_reward_max", max(rewards))
                for trajectory, reward in zip(group.trajectories, rewards, strict=True):
                    record("reward_mean", reward)
                    record("turns_mean", len(trajectory.steps))
                    record("segment_breaks", sum(step.break_reason is not None for step in trajectory.steps))
                    record("response_tokens_mean", sum(len(step.completion_ids) for step in trajectory.steps))
                    record("truncated_share", any(step.finish_reason == "length" for step in trajectory.steps))
        for sample in samples:
            record("sampled_tokens", sample.sampled_tokens)
        if samples:
            distinct = len({sample.token_ids.tobytes() for sample in samples})
            record("distinct_samples_share", distinct / len(samples))

    async def _report(self, seconds: dict[str, float], consumed: Sequence[CompleteGroup]) -> None:
        metrics = {
            "step": self.step,
            "epoch": max(item.epoch for item in consumed),
            "weight_version": self.coordinator.weight_version,
            **self.metrics.flush(),
        }
        rate = metrics["sampled_tokens"] / seconds["step_seconds"] if seconds["step_seconds"] > 0 else 0.0
        timings = {"step": self.step, **seconds, "tokens_per_second": rate}
        self.run_dir.lines["metrics"].write(metrics)
        self.run_dir.lines["timings"].write(timings)
        kept = [episode for item in consumed for episode in item.episodes]
        self._keep_trajectories(kept[:: max(1, len(kept) // max(1, self.config.training.trajectories_per_step))])
        self.run_dir.flush()
        self.progress.step(metrics, timings)
        self.trackers.log(self.step, {**metrics, **timings})
        await self.observers.notify("on_batch_end", state=self.state(), step=self.step, metrics=metrics)

    def _keep_trajectories(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes[: self.config.training.trajectories_per_step]:
            self.run_dir.lines["trajectories"].write_text(f'{{"step":{self.step},"episode":{episode.to_json()}}}')

    async def _validate(self) -> None:
        if not self.validation_plan:
            return
        await self.observers.notify("on_validation_start", state=self.state(), step=self.step)
        self.progress.validating(self.step, len(self.validation_plan))
        episodes = await play_all(self.runner, self.validation_plan, "validation")
        self.coordinator.touch()
        result = summarise(episodes, step=self.step, weight_version=self.coordinator.weight_version)
        self.validations.append(result)
        if self.observers.active("on_episode_finished"):
            for episode in episodes:
                await self.observers.notify("on_episode_finished", state=self.state(), episode=episode)
        for episode in episodes:
            if episode.error is not None:
                self._event("error", rollout=episode.rollout_id, task=episode.task_id, error=episode.error)
        self._event("validation", **result.to_dict())
        self._keep_trajectories(episodes)
        self.progress.validated(result)
        metrics = {key: float(value) for key, value in result.to_dict().items() if value is not None}
        self.trackers.log(self.step, {f"validation/{key}": value for key, value in metrics.items()})
        await self.observers.notify("on_validation_end", state=self.state(), step=self.step, metrics=metrics)

    def _event(self, event: str, **fields: Any) -> None:
        self.run_dir.lines["events"].write({"event": event, **fields})

    # ----------------------------------------------------------------------------------------------------------------
    # Books and checkpoints

    def _check_books(self) -> None:
        self.books.check(self.coordinator.outstanding * self.config.training.rollouts_per_group)

    async def _cancel_outstanding(self, reason: str) -> None:
        """Book everything in flight or buffered as cancelled."""
        self._cancelled_ordinals = sorted([*self._assemblies, *self.buffer.ordinals()])
        size = self.config.training.rollouts_per_group
        running = list(self._groups.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for _ in range(self.coordinator.in_flight):
            self.coordinator.on_dropped()
        self.coordinator.on_discarded(len(self.buffer.discard()))
        self.books.book("cancelled", reason, self.books.open)
        if self._cancelled_ordinals:
            self._event("cancel", groups=self._cancelled_ordinals, rollouts_per_group=size, reason=reason)

    async def _save_checkpoint(self) -> None:
        if self._checkpointed_step == self.step:
            return
        folder = checkpoint.begin(self.run_dir.checkpoints, self.step)
        backend_folder = folder / "backend"
        backend_folder.mkdir()
        await self.backend.save_checkpoint(backend_folder)
        self._event("checkpoint", step=self.step)
        again = sorted({*self._assemblies, *self.buffer.ordinals(), *self._again, *self._cancelled_ordinals})
        state = {
            "step": self.step,
            "incarnation": self.run_dir.incarnation,
            "synced_step": self._synced_step,
            "next_ordinal": self._next_ordinal,
            "outstanding_ordinals": again,
            "epoch": self.epoch,
            "coordinator": self.coordinator.state_dict(),
            "books": self._books_without_outstanding(),
            "validations": [validation.to_dict() for validation in self.validations],
            "backend": self.backend.state_dict(),
            "offsets": self.run_dir.sync(),
        }
        await asyncio.to_thread(checkpoint.commit, folder, state)
        self._checkpointed_step = self.step
        checkpoint.prune(self.run_dir.checkpoints, self.config.training.keep_checkpoints)
        self.progress.saved(folder)
        await self.observers.notify("on_checkpoint_saved", state=self.state(), step=self.step, directory=folder)

    def _books_without_outstanding(self) -> dict[str, Any]:
        """The books as a restart from here finds them: what is outstanding now is lost with this process."""
        state = self.books.state_dict()
        ended = {account: dict(reasons) for account, reasons in state["ended"].items()}
        if self.books.open:
            cancelled = ended.setdefault("cancelled", {})
            cancelled["restart"] = cancelled.get("restart", 0) + self.books.open
        return {**state, "ended": ended}

    async def _resume(self) -> None:
        manifest, folder = self.run_dir.manifest, self.run_dir.resumed
        if manifest is None or folder is None:
            return
        self.step = manifest["step"]
        self.epoch = self._epoch_begun = manifest["epoch"]
        self._synced_step = manifest["synced_step"]
        self._next_ordinal = manifest["next_ordinal"]
        self._again = list(manifest["outstanding_ordinals"])
        self.coordinator.load_state_dict(manifest["coordinator"])
        self.books.load_state_dict(manifest["books"])
        self.validations = [ValidationResult(**validation) for validation in manifest["validations"]]
        self._checkpointed_step = self.step
        self.backend.load_state_dict(manifest["backend"])
        await self.backend.load_checkpoint(folder / "backend")

    _cancelled_ordinals: Sequence[int] = ()
