"""Every hook of rllm-core. The docstring of a spec is its documentation.

Three kinds:

* **Provider hooks** return records (`rllm_core.providers`). All of a plugin's are asked together, at most once per
  process, when something is first listed or selected. They are plain functions. One that raises, or returns anything
  but an iterable of its record class, marks the whole plugin as broken.
* **Event hooks** observe a run. They are called in the driver process only, one plugin after another in the order of
  names, and never twice at a time for one plugin; ``tryfirst`` and ``trylast`` change nothing. An ``async def``
  implementation is awaited on the event loop, a plain one runs in a worker thread, both with a deadline. What they
  are given is a copy of their own, so they cannot change the run; what they return is ignored. One that raises is
  reported with its place and counted; one that overruns is disabled for the rest of the run. Neither ever stops
  training.
* **State hooks** let a plugin that observes a run go on where a checkpoint left it. They are called as event hooks are;
  what ``save_plugin_state`` returns is kept in the manifest of the checkpoint under the name of the plugin.

An implementation may leave out arguments it does not need, so specs can grow by new arguments.

    from rllm_core import hookimpl
    from rllm_core.providers import Backend

    @hookimpl
    def backends():
        return [Backend(name="mine", load="my_package.backend:MyBackend", summary="My training stack.")]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from rllm_core.backend import PolicyUpdate
    from rllm_core.providers import (
        AdvantageEstimator,
        Backend,
        Command,
        Correction,
        Engine,
        Parser,
        PolicyLoss,
        RewardFunction,
        Sandbox,
        Tracker,
        Workflow,
    )
    from rllm_core.training.state import TrainerState
    from rllm_core.types import Episode

PROJECT = "rllm_core"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --------------------------------------------------------------------------------------------------------------------
# Provider hooks


@hookspec
def backends() -> Iterable[Backend]:
    """Training backends this plugin provides, selected by ``backend`` in the run file.

    Return records, import nothing heavy: the class behind ``load`` is imported when its name is selected.
    """
    return ()


@hookspec
def rollout_engines() -> Iterable[Engine]:
    """Rollout engines that work without a backend, for ``rllm-core eval WORKFLOW --engine NAME``."""
    return ()


@hookspec
def parsers() -> Iterable[Parser]:
    """Parsers this plugin provides, selected by ``parser`` in the run file."""
    return ()


@hookspec
def workflows() -> Iterable[Workflow]:
    """Workflows this plugin provides, selected by ``workflow`` in the run file or on the command line."""
    return ()


@hookspec
def trackers() -> Iterable[Tracker]:
    """Metric trackers this plugin provides, selected by ``training.trackers`` in the run file.

    A tracker that fails is reported and switched off; it never stops training.
    """
    return ()


@hookspec
def advantage_estimators() -> Iterable[AdvantageEstimator]:
    """Advantage estimators this plugin provides, selected by ``algorithm.name`` in the run file.

    Their names work exactly as the core's own do.
    """
    return ()


@hookspec
def policy_losses() -> Iterable[PolicyLoss]:
    """Policy losses this plugin provides, selected by ``algorithm.loss``; the backend must be able to run them."""
    return ()


@hookspec
def corrections() -> Iterable[Correction]:
    """Off-policy corrections this plugin provides, selected by ``algorithm.corrections``.

    They are computed on numpy arrays and work on every backend that knows the proximal policy.
    """
    return ()


@hookspec
def reward_functions() -> Iterable[RewardFunction]:
    """Reward functions this plugin provides, which workflows look up by name.

    They run in child processes with limits on time, memory and output, never in the process that trains.
    """
    return ()


@hookspec
def sandboxes() -> Iterable[Sandbox]:
    """Sandboxes this plugin provides for programs that a model wrote, selected by ``rollout.sandbox``.

    The core's own, ``child``, bounds time, memory and output of a program and isolates nothing.
    """
    return ()


@hookspec
def cli_commands() -> Iterable[Command]:
    """Commands to add to ``rllm-core``. A command that cannot be loaded stays in the list and explains itself.

    A command with the name of one of the core's own marks its plugin as broken.
    """
    return ()


# --------------------------------------------------------------------------------------------------------------------
# Event hooks


@hookspec
def on_train_start(state: TrainerState) -> None:
    """Training begins: the engine is up and any checkpoint has been loaded.

    Called once per start of a run, before ``on_policy_updated`` with reason ``start`` or ``resume``. The return value
    is ignored.
    """


@hookspec
def on_train_end(state: TrainerState, status: str) -> None:
    """Training has ended, with ``status`` ``completed``, ``failed`` or ``interrupted``.

    Called once per start of a run, last, also after errors. The return value is ignored.
    """


@hookspec
def on_epoch_start(state: TrainerState, epoch: int) -> None:
    """The first task of pass ``epoch`` (from 0) over the training tasks is about to be dispatched.

    In asynchronous runs this is a dispatch-time event: earlier epochs may still be in training.
    """


@hookspec
def on_epoch_end(state: TrainerState, epoch: int) -> None:
    """The last task of pass ``epoch`` has been dispatched."""


@hookspec
def on_batch_start(state: TrainerState, step: int) -> None:
    """The training half of optimizer step ``step`` (from 1) begins.

    Called once per optimizer step, before its first forward-backward pass.
    """


@hookspec
def on_batch_end(state: TrainerState, step: int, metrics: dict[str, float]) -> None:
    """Optimizer step ``step`` is done, weights are synchronised if they were due, ``metrics`` are final.

    Called once per optimizer step, after ``on_policy_updated``.
    """


@hookspec
def on_validation_start(state: TrainerState, step: int) -> None:
    """Validation of the weights after ``step`` optimizer steps begins."""


@hookspec
def on_validation_end(state: TrainerState, step: int, metrics: dict[str, float]) -> None:
    """Validation of the weights after ``step`` optimizer steps has ended with ``metrics``."""


@hookspec
def on_episode_finished(state: TrainerState, episode: Episode) -> None:
    """A rollout has ended, well or badly; ``episode.is_validation`` tells which kind it was.

    Called once per rollout attempt, in the order of their ends.
    """


@hookspec
def on_checkpoint_saved(state: TrainerState, step: int, directory: Path) -> None:
    """A checkpoint is complete on disk: its manifest, written last, is in ``directory``."""


@hookspec
def on_policy_updated(update: PolicyUpdate, state: TrainerState) -> None:
    """Policy version ``update.version`` is live: every rollout dispatched from now on samples from it.

    Called exactly once per version and start of a run, in the synchronous and the asynchronous loop alike, after the
    backend's own `BackendProtocol.on_policy_updated` has returned, and before the next rollout is dispatched.
    ``update.reason`` is ``start`` for the weights a run begins with, ``resume`` for those of a checkpoint, ``step``
    after training. ``state`` is read-only. Pushing the weights is the backend's duty, not this hook's; here plugins
    learn of it.
    """


# --------------------------------------------------------------------------------------------------------------------
# State hooks


@hookspec
def save_plugin_state(state: TrainerState) -> dict[str, Any] | None:
    """A checkpoint is being written: return a JSON object from which this plugin can go on, or None for nothing.

    Called once per checkpoint. By then ``on_batch_end`` has been called for every step up to ``state.step`` and for
    none after it, and ``on_episode_finished`` for every rollout that the checkpoint holds, perhaps also for some that
    are played again after a resume because the rest of their group was not finished. What is returned must come back
    from JSON equal: keys are strings, numbers are finite, there are no tuples. Anything else, an exception or an
    overrun is reported, and the checkpoint is written without a state of this plugin.
    """


@hookspec
def load_plugin_state(state: TrainerState, saved: dict[str, Any]) -> None:
    """The run goes on from a checkpoint for which this plugin's ``save_plugin_state`` has returned ``saved``.

    Called at most once per start of a run, before ``on_train_start``; not called if the checkpoint holds no state of
    this plugin, which is said then. The return value is ignored.
    """
