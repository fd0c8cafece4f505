"""Every hook of rllm-core. The docstring of a spec is its documentation.

There are four kinds:

* **Provider hooks** return records (`rllm_core.providers`). All provider hooks of a plugin are called together, at most
  once per process, when something is first listed or selected. They are plain functions. If one raises, or returns
  anything but an iterable of its record class, the whole plugin is marked as broken.
* **Event hooks** observe a run. They are called in the driver process only, one plugin after another by name, and never
  concurrently for one plugin; ``tryfirst`` and ``trylast`` have no effect. An ``async def`` implementation is awaited
  on the event loop; a plain one runs in a worker thread. Both have a deadline. Each call gets its own copies of the
  arguments, so observers cannot change the run. Return values are ignored. An implementation that raises is reported
  with file and line, and counted. A plugin that misses the deadline is not called again in this run. Neither ever
  stops training.
* **State hooks** let an observing plugin continue from a checkpoint. They are called like event hooks. The manifest of
  the checkpoint stores the result of ``save_plugin_state`` under the plugin's name.
* **Remark hooks** return lines for the user, in the terminal and in a notebook. They are called like event hooks.

An implementation may leave out arguments it does not need, so new arguments can be added to specs later.

    from rllm_core import hookimpl
    from rllm_core.providers import BackendProvider

    @hookimpl
    def backends():
        return [BackendProvider(name="mine", load="my_package.backend:MyBackend", summary="My training stack.")]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from rllm_core import providers
    from rllm_core.events import PolicyUpdate, TrainerState
    from rllm_core.types import Episode

PROJECT = "rllm_core"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --------------------------------------------------------------------------------------------------------------------
# Provider hooks


@hookspec
def backends() -> Iterable[providers.BackendProvider]:
    """Training backends this plugin provides, selected by ``backend`` in the run file.

    Return records only and import nothing heavy: the class behind ``load`` is imported when its name is selected.
    """
    return ()


@hookspec
def rollout_engines() -> Iterable[providers.EngineProvider]:
    """Rollout engines that work without a backend, for ``rllm-core eval WORKFLOW --engine NAME``."""
    return ()


@hookspec
def parsers() -> Iterable[providers.ParserProvider]:
    """Parsers this plugin provides, selected by ``parser`` in the run file."""
    return ()


@hookspec
def workflows() -> Iterable[providers.WorkflowProvider]:
    """Workflows this plugin provides, selected by ``workflow`` in the run file or on the command line."""
    return ()


@hookspec
def rollout_hosts() -> Iterable[providers.RolloutHostProvider]:
    """Rollout hosts this plugin provides: where rollouts run, selected by ``rollout.host``.

    The built-in hosts are ``inline``, the process of the run, and ``processes``, other processes of the machine.
    """
    return ()


@hookspec
def trackers() -> Iterable[providers.TrackerProvider]:
    """Metric trackers this plugin provides, selected by ``training.trackers`` in the run file.

    A tracker that fails is reported and disabled; it never stops training.
    """
    return ()


@hookspec
def advantage_estimators() -> Iterable[providers.AdvantageEstimatorProvider]:
    """Advantage estimators this plugin provides, selected by ``algorithm.name`` in the run file.

    Their names work exactly like those of the built-in estimators.
    """
    return ()


@hookspec
def policy_losses() -> Iterable[providers.PolicyLossProvider]:
    """Policy losses this plugin provides, selected by ``algorithm.loss``; the backend must be able to run them."""
    return ()


@hookspec
def corrections() -> Iterable[providers.CorrectionProvider]:
    """Off-policy corrections this plugin provides, selected by ``algorithm.corrections``.

    They are computed on numpy arrays and work on every backend that supports the proximal policy.
    """
    return ()


@hookspec
def group_scorers() -> Iterable[providers.GroupScorerProvider]:
    """Group scorers this plugin provides, selected by ``algorithm.group_scorer``.

    A group scorer sees all rollouts of a task at once and gives each its reward, such as a judge that compares them.
    """
    return ()


@hookspec
def task_samplers() -> Iterable[providers.TaskSamplerProvider]:
    """Task samplers this plugin provides, selected by ``training.sampler``.

    A task sampler chooses the tasks of a run and gets the result of each. The built-in sampler is ``uniform``, which
    takes every task once per epoch.
    """
    return ()


@hookspec
def reward_functions() -> Iterable[providers.RewardFunctionProvider]:
    """Reward functions this plugin provides, which workflows look up by name.

    They run in child processes with limits on time, memory and output, never in the training process.
    """
    return ()


@hookspec
def sandboxes() -> Iterable[providers.SandboxProvider]:
    """Sandboxes this plugin provides for model-written programs, selected by ``rollout.sandbox``.

    The built-in sandbox, ``child``, limits the time, memory and output of a program, but does not isolate it. ``bwrap``
    of ``rllm-bwrap`` does.
    """
    return ()


@hookspec
def cli_commands() -> Iterable[providers.CommandProvider]:
    """Commands to add to ``rllm-core``. A command that cannot be loaded stays listed and prints the reason when called.

    A name of two words, such as ``plugins check``, adds a command to a group of the core: ``parser`` or ``plugins``.
    A plugin whose command has the name of a built-in command is marked as broken.
    """
    return ()


# --------------------------------------------------------------------------------------------------------------------
# Event hooks


@hookspec
def on_train_start(state: TrainerState) -> None:
    """Called when training starts, after the engine is up and any checkpoint has been loaded.

    Runs once per launch, before ``on_policy_updated`` with reason ``start`` or ``resume``. The return value is ignored.
    """


@hookspec
def on_train_end(state: TrainerState, status: str) -> None:
    """Called when training has ended, with ``status`` ``completed``, ``failed`` or ``interrupted``.

    Runs once per launch, after all other hooks and also after errors. The return value is ignored.
    """


@hookspec
def on_epoch_start(state: TrainerState, epoch: int) -> None:
    """Called before the first task of epoch ``epoch`` (from 0) is dispatched.

    An epoch is a pass over the training tasks. In asynchronous runs, earlier epochs may still be in training.
    """


@hookspec
def on_epoch_end(state: TrainerState, epoch: int) -> None:
    """Called after the last task of epoch ``epoch`` has been dispatched."""


@hookspec
def on_batch_start(state: TrainerState, step: int) -> None:
    """Called when the training half of optimizer step ``step`` (from 1) starts.

    Runs once per optimizer step, before its first forward-backward pass.
    """


@hookspec
def on_batch_end(state: TrainerState, step: int, metrics: dict[str, float]) -> None:
    """Called after optimizer step ``step``, when any weight sync that was due is done and ``metrics`` are final.

    Runs once per optimizer step, after ``on_policy_updated``.
    """


@hookspec
def on_validation_start(state: TrainerState, step: int) -> None:
    """Called when validation starts, for the weights after ``step`` optimizer steps."""


@hookspec
def on_validation_end(state: TrainerState, step: int, metrics: dict[str, float]) -> None:
    """Called when validation has ended with ``metrics``, for the weights after ``step`` optimizer steps."""


@hookspec
def on_episode_finished(state: TrainerState, episode: Episode) -> None:
    """Called when a rollout has succeeded or failed; ``episode.is_validation`` marks validation rollouts.

    Runs once per rollout attempt, in the order in which attempts end.
    """


@hookspec
def on_checkpoint_saved(state: TrainerState, step: int, directory: Path) -> None:
    """Called when a checkpoint in ``directory`` is complete on disk, including its manifest, which is written last."""


@hookspec
def on_policy_updated(update: PolicyUpdate, state: TrainerState) -> None:
    """Called when weight version ``update.version`` is live in the engine: later rollouts sample from it.

    Runs exactly once per weight version and launch, in the synchronous and the asynchronous loop alike. The backend's
    own `BackendProtocol.on_policy_updated` has returned by then, and the next rollout has not been dispatched.
    ``update.reason`` is ``start`` for the initial weights, ``resume`` for those of a checkpoint, and ``step`` after
    training. ``state`` is read-only. The backend syncs the weights to the engine; this hook only reports that.
    """


# --------------------------------------------------------------------------------------------------------------------
# State hooks


@hookspec
def save_plugin_state(state: TrainerState) -> dict[str, Any] | None:
    """Returns the plugin's state for a checkpoint that is being written: a JSON object, or None to save nothing.

    Runs once per checkpoint. By then, ``on_batch_end`` has been called for every step up to ``state.step`` and for none
    after it. ``on_episode_finished`` has been called for every rollout that the checkpoint holds. It may also have been
    called for rollouts that run again after a resume, because the rest of their group was not finished.

    The result must survive a round trip through JSON: string keys, finite numbers, no tuples. If it does not, or if the
    hook raises or misses its deadline, the failure is reported and the checkpoint holds no state of this plugin.
    """


@hookspec
def load_plugin_state(state: TrainerState, saved: dict[str, Any]) -> None:
    """Restores ``saved``, the state that ``save_plugin_state`` returned for the checkpoint being resumed.

    Runs at most once per launch, before ``on_train_start``. If the checkpoint holds no state of this plugin, the run
    reports that instead of calling the hook. The return value is ignored.
    """


# --------------------------------------------------------------------------------------------------------------------
# Remark hooks


@hookspec
def remarks(state: TrainerState, metrics: dict[str, float], books: dict[str, dict[str, int]]) -> list[str] | None:
    """Returns lines to show during the run, such as a warning; empty if there is nothing to say.

    Runs once before the first rollout of a launch, with empty ``metrics``, and then after each optimizer step, after
    ``on_batch_end``. ``books`` counts the rollouts so far by outcome and reason, as in ``summary.json``.
    Every line is shown, without control characters.
    """
    return None


@hookspec
def closing_lines(run_dir: Path, summary: dict[str, Any]) -> list[str] | None:
    """Returns lines to show when the run has ended and all of its files are complete, also after an error.

    Runs once per launch, after ``on_train_end``. ``summary`` is the content of ``summary.json``.
    """
    return None
