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
from collections.abc import Sequence

from rllm_core.backend import OptimizerStep, Policy, UpdateResult, checked_update
from rllm_core.costs import LOGPROBS, TRAINING, Tally, collecting
from rllm_core.errors import RunError
from rllm_core.limits.timeouts import stop, watch
from rllm_core.training.crediting import Crediting
from rllm_core.training.generation import Generation
from rllm_core.training.group import Group
from rllm_core.training.rollouts import Rollout
from rllm_core.training.run_parts import RunParts
from rllm_core.training.saving import Saving
from rllm_core.training.stopping import BudgetSpent, Interrupted
from rllm_core.training.validation import nll_per_token, plan, play_all, summarize, written_samples
from rllm_core.training.weights import Weights
from rllm_core.types import Episode, Floats, TrainingSample


class Trainer:
    """Runs one training; not reusable."""

    def __init__(self, parts: RunParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.backend = parts.backend
        self.coordinator = parts.coordinator
        self.ledger = parts.ledger
        self.pace = parts.pace
        self.reporter = parts.reporter
        self.crediting = Crediting(
            parts.config,
            parts.algorithm,
            self._compute_logprobs,
            forward_is_proximal=parts.capabilities.forward_is_proximal,
        )
        self.generation = Generation(parts)
        self.weights = Weights(parts)
        self.saving = Saving(parts, self.generation)
        parts.budget.on_spent = lambda: self.interrupt(BudgetSpent(parts.budget.problem()))
        self._spent = Tally(parts.costs)  # costs of the current optimizer step
        rollouts = parts.config.training.validation_rollouts
        validated = parts.tasks.of("validation") if rollouts else ()
        self.validation_plan = plan(validated, rollouts, samples=parts.workflow.samples)
        self._interrupt: Interrupted | None = None
        self._validating: asyncio.Task[list[Rollout]] | None = None
        self._remarking: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.parts.position.step

    # ----------------------------------------------------------------------------------------------------------------
    # Life cycle

    async def run(self) -> None:
        """Trains until the planned steps are done.

        Raises:
            Interrupted: After `interrupt`; a checkpoint has been saved.
            RunError: If rollout accounting is inconsistent, the run stalls, or too many groups are filtered.
        """
        with collecting(self.parts.costs):
            await self._run()

    async def _run(self) -> None:
        parts, status = self.parts, "failed"
        try:
            await self.saving.resume()
            self.reporter.event(
                "begin",
                incarnation=parts.run_dir.incarnation,
                step=self.step,
                steps=self.config.training.steps,
                restored=parts.buffer.ordinals(),
                groups_kept_per_step=self.config.training.groups_kept_per_step,
                trajectories_per_step=self.config.training.trajectories_per_step,
            )
            must_generate = self.step < self.config.training.steps and len(parts.buffer) < parts.passes[1]
            if must_generate and not parts.budget.fits(self.config.training.rollouts_per_group):
                raise BudgetSpent(parts.budget.problem())
            await parts.notify("on_train_start")
            await parts.remark({})
            await self.weights.publish(parts.position, "resume" if parts.run_dir.resumed else "start")
            parts.progress.watch(self.pace.now)
            if self.step == 0 and self._is_validation_due():
                await self._validate()
            await self._run_halves()
            self.ledger.check()
            if self.step < self.config.training.steps:
                raise RunError(f"{self.step} of {self.config.training.steps} planned steps were trained")
            status = "completed"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self.ledger.cancel_complete("run_failed")  # groups restored from a checkpoint, if training never began
            await parts.runner.aclose()
            self._spent.close(after_step=self.step)
            await self._remarked()
            await parts.notify("on_train_end", status=status)

    def interrupt(self, error: Interrupted) -> None:
        """Stops generation and validation immediately, and training after the current step, so that no work is lost."""
        self._interrupt = self._interrupt or error
        self.parts.buffer.fail(error)
        if self._validating is not None:
            self._validating.cancel()

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
            self.ledger.give_back()
            try:
                if interrupted:
                    self.ledger.check()
                    await self._save_checkpoint()
            finally:
                self.ledger.cancel_complete(reason)
            raise
        finally:
            await stop(training, generation, watchdog)

    # ----------------------------------------------------------------------------------------------------------------
    # Training

    async def _train(self) -> None:
        training = self.config.training
        if self._is_validation_due():  # interrupted in the previous launch; as there, generation runs meanwhile
            await self._validate()
        while self.step < training.steps:
            await self._train_step(self.step + 1)
            self.parts.garbage.collect()
            last = self.step == training.steps
            if self._is_validation_due():
                await self._validate()
            if last or (training.checkpoint_every_steps and self.step % training.checkpoint_every_steps == 0):
                await self._save_checkpoint()
            if self._interrupt is not None and not last:
                raise self._interrupt

    async def _train_step(self, step: int) -> None:
        parts, training = self.parts, self.config.training
        self.pace.begin_step()
        taken = await self._take()
        await parts.notify("on_batch_start", step=step)
        if parts.capabilities.colocated:
            await self.weights.drained()
            await self.backend.enter_training()
        samples: list[TrainingSample] = []
        while True:
            with self.pace.spending("training"):
                samples += await self._process(taken)
            if len(self.ledger.consumed) == training.groups_per_step:
                break
            taken = await self._take()
        planned = OptimizerStep(
            step=step,
            total_steps=training.steps,
            samples=len(samples),
            sampled_tokens=sum(sample.sampled_tokens for sample in samples),
            trajectories=sum(len(group.trajectories) for item in self.ledger.consumed for group in item.groups),
        )
        with self.pace.spending("training"):
            result = UpdateResult()
            if samples:  # otherwise, Adam's state from earlier steps would still move the weights
                result = checked_update(self.backend, await self.backend.update_policy(planned))
        parts.position.step = step
        self.generation.groups_since_step = 0
        trained = self.ledger.train(planned)
        parts.stream.trained(trained)
        self.reporter.difficulty(self.generation.difficulty.take(group.episodes for group in trained))
        known = {**result.metrics, **self.crediting.diagnostics.flush(), **parts.stream.metrics()}
        self.reporter.trained(trained, samples, known, self.coordinator.weight_version)
        recorded = self.parts.recording.trained(
            trained, samples, self.crediting.take_corrections(), result.tokens, step=step
        )
        if step % training.trigger_parameter_sync_step == 0 or step == training.steps:
            parts.stream.hand_over(step=step)
            await self.weights.synchronize(parts.position)
        elif parts.capabilities.colocated:
            await self.backend.enter_generation()
        self.ledger.check()
        pace = self.pace.end_step()
        pace["worker_restarts"] = parts.host.report().restarts if parts.host.runs_elsewhere else None
        self._spent.add(TRAINING, seconds=pace["training_seconds"] or 0.0)
        self._spent.close(step=step)
        self._spent = Tally(parts.costs)
        spent = parts.costs.amounts()
        pace |= {f"spent_{name}": spent.get(name) for name in ("tokens", "calls", "money")}
        metrics = self.reporter.step(step, self.coordinator.weight_version, trained, pace)
        self.reporter.answers(step, recorded)
        await parts.notify("on_batch_end", step=step, metrics=metrics)
        await self._remarked()
        # In a task, so that validation and checkpoint do not wait for the remarks.
        self._remarking = asyncio.create_task(parts.remark(metrics), name="remarks")

    async def _remarked(self) -> None:
        """Waits for the remarks about the previous step; cancelling the wait does not cancel them."""
        if self._remarking is not None and not self._remarking.done():
            await asyncio.wait({self._remarking})

    async def _take(self) -> list[Group]:
        with self.pace.spending("generation_wait"):
            return await self.ledger.take()

    async def _process(self, taken: Sequence[Group]) -> list[TrainingSample]:
        """Computes advantages and samples of the groups, then runs the forward-backward passes."""
        trained = []
        per_pass, _ = self.parts.passes
        since_sync = self.step - self.parts.position.synced_step
        version = self.coordinator.weight_version + since_sync / self.config.training.trigger_parameter_sync_step
        credited = await self.crediting.credited(taken, weight_version=version)
        for start in range(0, len(credited), per_pass):
            chunk = [sample for group in credited[start : start + per_pass] for sample in group]
            if not chunk:
                continue  # all groups of this pass were filtered
            chunk = await self.crediting.corrected(chunk, proximal_version=version)
            await self.backend.process_backend_batch(self.backend.transform_to_backend_batch(chunk))
            self.coordinator.touch()
            sampled = sum(sample.sampled_tokens for sample in chunk)
            self._spent.add(TRAINING, 1, sum(len(sample.token_ids) for sample in chunk) - sampled, sampled)
            trained += chunk
        return trained

    async def _compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy) -> list[Floats]:
        computed = await self.backend.compute_logprobs(samples, policy)
        self.coordinator.touch()
        self._spent.add(LOGPROBS, 1, sum(len(sample.token_ids) for sample in samples))
        return computed

    # ----------------------------------------------------------------------------------------------------------------
    # Validation

    def _is_validation_due(self) -> bool:
        """Whether the weights of this step need validation and have not been validated."""
        training = self.config.training
        every = training.validate_every_steps
        wanted = self.step in (0, training.steps) or bool(every and self.step % every == 0)
        done = any(result.step == self.step for result in self.parts.position.validations)
        return wanted and bool(self.validation_plan) and not done

    async def _validate(self) -> None:
        parts, step = self.parts, self.step
        await parts.notify("on_validation_start", step=step)
        parts.progress.validating(step, len(self.validation_plan))
        rollouts = await self._play_validation()
        self.coordinator.touch()
        episodes = [rollout.episode for rollout in rollouts]
        failed = [episode for rollout in rollouts for episode in rollout.failed]
        nll = await self._nll_per_token(episodes) if parts.algorithm.estimators.learns_written else None
        version = self.coordinator.weight_version
        result = summarize(episodes, step=step, weight_version=version, nll=nll, retries=len(failed))
        parts.position.validations.append(result)
        if parts.observers.active("on_episode_finished"):
            for episode in episodes:
                await parts.notify("on_episode_finished", episode=episode)
        metrics = self.reporter.validated(result, episodes, failed)
        tasks = [task for task, _ in self.validation_plan]
        parts.recording.validated(list(zip(tasks, rollouts, strict=True)), step=step)
        await parts.notify("on_validation_end", step=step, metrics=metrics)

    async def _play_validation(self) -> list[Rollout]:
        if self._interrupt is not None:
            raise self._interrupt
        self._validating = asyncio.create_task(self._validation_rollouts())
        try:
            return await self._validating
        except (asyncio.CancelledError, Interrupted):
            self.parts.progress.note(f"the validation after step {self.step} did not end; a resumed run repeats it")
            if self._interrupt is not None:
                raise self._interrupt from None
            raise
        finally:
            self._validating = None

    async def _validation_rollouts(self) -> list[Rollout]:
        parts = self.parts
        rollouts = await play_all(parts.runner, self.validation_plan, "validation", self.step, parts.budget)
        if parts.scoring is not None:
            tasks = [task for task, _ in self.validation_plan]
            rollouts, errors = await parts.scoring.score_rollouts(rollouts, tasks, "validation")
            for task_id, error in errors:
                self.reporter.unscored(task_id, error)
        return rollouts

    async def _nll_per_token(self, episodes: Sequence[Episode]) -> float | None:
        """Computes the negative log-likelihood of the target tokens under the current weights."""
        takes_turns = self.parts.capabilities.colocated
        if takes_turns:
            self.coordinator.pause()
            await self.weights.drained()
            await self.backend.enter_training()
        samples = written_samples(episodes)
        logprobs: list[Floats] = []
        for start in range(0, len(samples), self.config.training.groups_per_step):
            part = samples[start : start + self.config.training.groups_per_step]
            logprobs += await self.crediting.logprobs(part, "current")
        if takes_turns:
            await self.backend.enter_generation()
            self.coordinator.resume()
        return nll_per_token(logprobs)

    async def _save_checkpoint(self) -> None:
        folder = await self.saving.save(self.parts.position)
        if folder is not None:
            await self.parts.notify("on_checkpoint_saved", step=self.step, directory=folder)
