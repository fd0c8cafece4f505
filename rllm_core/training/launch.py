"""Launches a run: selects the plugins, checks that they fit, trains and writes the summary."""

from __future__ import annotations

import asyncio
import gc
import platform
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm_core import providers
from rllm_core.assembly.algorithm import Algorithm, passes
from rllm_core.assembly.components import kl_notes
from rllm_core.assembly.imitation import check_imitation
from rllm_core.assembly.support import backend_class, check_support
from rllm_core.assembly.tasks import Tasks
from rllm_core.assembly.teacher import open_teacher
from rllm_core.backend import BackendProtocol
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import ConfigError, PluginError, RunError, StallError, UserError
from rllm_core.limits.backend_timeouts import with_timeouts
from rllm_core.limits.guard import Guard, leave, patience
from rllm_core.limits.timeouts import within
from rllm_core.observers import Observers
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.plugins.blame import blamed
from rllm_core.plugins.requirements import pip_install, unmet
from rllm_core.run_folder import first_failures
from rllm_core.run_folder import plot as report
from rllm_core.run_folder.first_failures import FirstFailures
from rllm_core.run_folder.folder import RunDir
from rllm_core.services import Services
from rllm_core.training.books import Books
from rllm_core.training.progress import Harmless, Progress
from rllm_core.training.run_parts import RunParts
from rllm_core.training.trackers import Tracker, Trackers, construct
from rllm_core.training.trainer import Interrupted, Trainer
from rllm_core.workflow import Workflow

SHUTDOWN_TIMEOUT_SECONDS = 60.0  # for the backend
CLOSING_TIMEOUT_SECONDS = 10.0  # for the workflow, and for its services


@dataclass
class Assembly:
    """Parts of a run, selected and checked, before anything is allocated.

    Attributes:
        not_checked: Settings that the backend could not check, for ``--dry-run``.
        notes: Remarks about settings whose effect differs from their plain meaning.
        trackers: Trackers by their names in the run file.
        is_hung: Whether the backend or a tracker did not stop in time; its threads may keep the process from exiting.
    """

    config: RunConfig
    plugins: PluginManager
    workflow: Workflow
    tasks: Tasks
    backend: BackendProtocol[Any]
    algorithm: Algorithm
    not_checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trackers: dict[str, Tracker] = field(default_factory=dict)
    is_hung: bool = False

    def derived(self) -> dict[str, int]:
        """Returns numbers computed from the run file and the capabilities of its backend."""
        per_pass, _ = passes(self.config, type(self.backend).capabilities(self.config), self.algorithm)
        groups = self.config.training.groups_per_step
        return self.config.derived() | {"forward_backward_passes_per_step": groups // per_pass}

    def parser(self) -> BaseParser:
        """Builds the parser for the backend's model (reads the tokenizer)."""
        provided = self.plugins.select(providers.ParserProvider, self.config.parser)
        parser_class: type[BaseParser] = self.plugins.load(provided)
        model = self.backend.model_path()
        with provided.at_work("from_model", parser_class):
            return parser_class.from_model(model, self.config.plugins.get(self.config.parser))

    async def engine(self) -> RolloutEngine:
        """Allocates the backend and returns its engine."""
        seconds = self.config.training.backend_timeout_seconds
        what = f"init_rollout_engine of backend {self.config.backend!r}"
        with patience(seconds):  # a parser may have to download or create its model first
            parser = self.parser()
        return await within(seconds, what, self.backend.init_rollout_engine(parser))


def assemble(config: RunConfig, plugins: PluginManager) -> Assembly:
    """Selects and checks the parts of a run without allocating anything.

    Raises:
        ConfigError: If a setting is invalid or the backend does not support it.
        PluginError: If a part is missing or broken.
    """
    _check_requirements(config)
    workflow = workflow_of(config, plugins)
    provided_backend = plugins.select(providers.BackendProvider, config.backend)
    chosen_backend = backend_class(provided_backend, plugins)
    algorithm = Algorithm.of(config, plugins)
    capabilities = chosen_backend.capabilities(config)
    check_imitation(config, capabilities, algorithm, workflow, plugins)
    check_support(config, capabilities, algorithm, plugins)
    tasks = Tasks(workflow, config.workflow)
    if config.training.validation_rollouts:
        tasks.check_apart()
    if not len(tasks.of("train")):
        raise ConfigError(
            f"workflow {config.workflow!r} has no training tasks: tasks('train') returned an empty sequence; check its "
            "settings and its data file"
        )
    with provided_backend.at_work("its construction", chosen_backend):
        backend = chosen_backend(config, plugins)
    with provided_backend.at_work("validate_config", chosen_backend):
        not_checked = backend.validate_config()
    notes = kl_notes(config.algorithm.kl)
    if not workflow.samples:
        rows, trained = len(tasks.of("train")), config.training.steps * config.training.groups_per_step
        notes.append(f"{config.training.steps} steps train {trained:,} rows, {trained / rows:.3g} epochs of {rows:,}")
    per_pass, per_take = passes(config, capabilities, algorithm)
    if per_pass != config.groups_per_pass:
        notes.append(
            f"one forward-backward pass per step: backend {config.backend!r} cannot normalize the loss afterwards"
        )
    elif per_take > config.groups_per_pass:
        because = (
            "engine and trainer share devices" if capabilities.colocated else "the estimator needs the whole batch"
        )
        notes.append(f"gradients are not accumulated while groups arrive: {because}")
    trackers = construct(config, plugins)
    return Assembly(config, plugins, workflow, tasks, backend, algorithm, not_checked, notes, trackers)


def workflow_of(config: RunConfig, plugins: PluginManager) -> Workflow:
    """Constructs the workflow of a run file, with its own section."""
    provided = plugins.select(providers.WorkflowProvider, config.workflow)
    workflow_class: type[Workflow] = plugins.load(provided)
    if not isinstance(workflow_class, type) or not issubclass(workflow_class, Workflow):
        raise PluginError(
            f"workflow {provided.record.name!r} ({provided.plugin.label}): {provided.record.load} must be a subclass "
            "of rllm_core.workflow.Workflow"
        )
    plugins.select(providers.SandboxProvider, config.rollout.sandbox)
    with provided.at_work("its construction", workflow_class):
        workflow = workflow_class(config.plugins.get(config.workflow))
    workflow.services = Services(plugins, config.rollout.sandbox)
    return workflow


@asynccontextmanager
async def opened(workflow: Workflow, config: RunConfig, note: Callable[[str], None]) -> AsyncIterator[None]:
    """Opens a workflow for all rollouts, and closes it and its services however they end.

    Args:
        workflow: Workflow to open.
        config: Run file, for the timeout.
        note: Called with a message if closing fails, which does not fail the run.

    Raises:
        StallError: If opening times out.
    """
    try:
        what = f"open() of workflow {config.workflow!r}"
        await within(config.training.backend_timeout_seconds, what, workflow.open())
        yield
    finally:
        for what, closing in (
            (f"close() of workflow {config.workflow!r}", workflow.close),
            ("close() of its services", workflow.services.close),
        ):
            try:
                await within(CLOSING_TIMEOUT_SECONDS, what, closing())
            except StallError as stuck:
                note(f"{stuck}; leaving it running")
            except Exception as error:  # third-party code; the rollouts are done
                note(f"{what} failed: {blamed(error)}")


def _check_requirements(config: RunConfig) -> None:
    missing = unmet("the run file", config.requires)
    if missing:
        raise ConfigError(f"requires: {missing[0]}; {pip_install(*(lack.requirement for lack in missing))}")


async def train(
    assembly: Assembly, path: Path, *, resume: bool, progress: Progress, guard: Guard | None = None
) -> dict[str, Any]:
    """Trains in the folder ``path`` and returns the content of its ``summary.json``.

    Args:
        assembly: Parts of the run.
        path: Run folder.
        resume: Whether to continue the run in the folder.
        progress: Progress display.
        guard: Guard that ends the process if its event loop is blocked; None if the process is not the run's own.

    Raises:
        Interrupted: After SIGINT or SIGTERM; the run can be resumed.
        UserError: If the run failed for a reason that its message explains.
    """
    progress = Harmless(progress)
    run_dir = RunDir(path, assembly.config, resume=resume)
    signals = _Signals(progress)
    with signals, guard or nullcontext():
        return await _train(assembly, run_dir, signals, resume=resume, progress=progress)


async def _train(
    assembly: Assembly, run_dir: RunDir, signals: _Signals, *, resume: bool, progress: Progress
) -> dict[str, Any]:
    config, path = assembly.config, run_dir.path
    started = time.time()
    summary: dict[str, Any] = {
        "status": "failed",
        "optimizer_steps": 0,
        "planned_steps": config.training.steps,
        "resumed_from_step": run_dir.manifest["step"] if run_dir.manifest else None,
        "validation": [],
        "books": Books().totals(),
    }
    trainer: Trainer | None = None
    collection_thresholds = gc.get_threshold()
    observers = Observers(assembly.plugins)
    trackers = Trackers(assembly.trackers, note=progress.note)
    try:
        run_dir.write_json("plugins.json", [*(run_dir.read_json("plugins.json") or []), _versions(assembly.plugins)])
        progress.start(config, path, summary["resumed_from_step"] or 0)
        if resume and run_dir.manifest is None:
            progress.note(f"{path} has no complete checkpoint: restarting at step 0")
        trackers.start(config, str(path))
        engine = await assembly.engine()
        # Imported and allocated objects stay: no garbage collection needs to walk this half a million again.
        # A collection blocks the event loop while it walks its generation, so young collections must be frequent
        # to be short. Rollouts create hardly any reference cycles, so old ones can be rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(2_000, 10, 300)
        async with (
            open_teacher(config, assembly.plugins, engine.parser) as teacher,
            opened(assembly.workflow, config, progress.note),
        ):
            parts = RunParts(
                config=config,
                workflow=assembly.workflow,
                tasks=assembly.tasks,
                backend=with_timeouts(assembly.backend, config),
                engine=engine,
                algorithm=assembly.algorithm,
                observers=observers,
                run_dir=run_dir,
                progress=progress,
                trackers=trackers,
                teacher=teacher,
            )
            trainer = signals.trainer = Trainer(parts)
            await trainer.run()
        summary["status"] = "completed"
    except Interrupted as error:
        summary |= {"status": "interrupted", "error": str(error)}
        raise
    except asyncio.CancelledError as error:
        if signals.interrupted is None:
            summary["error"] = "cancelled"
            raise
        summary |= {"status": "interrupted", "error": str(signals.interrupted)}
        raise signals.interrupted from error
    except BaseException as error:
        summary["error"] = f"{type(error).__name__}: {error}" if isinstance(error, UserError) else blamed(error)
        raise
    finally:
        signals.trainer, signals.is_closing = None, True
        gc.unfreeze()
        gc.set_threshold(*collection_thresholds)
        try:
            what = f"shutdown of backend {config.backend!r}"
            await within(SHUTDOWN_TIMEOUT_SECONDS, what, assembly.backend.shutdown())
        except StallError as stuck:
            assembly.is_hung = True
            progress.note(f"{stuck}; leaving it running")
        except Exception as error:  # third-party code; the run is done
            progress.note(f"{what} failed: {blamed(error)}")
        finally:
            if trainer is not None:
                summary |= {
                    "optimizer_steps": trainer.step,
                    "validation": [validation.to_dict() for validation in trainer.parts.position.validations],
                    "books": trainer.ledger.books.totals(),
                    "books_by_reason": trainer.ledger.books.by_reason(),
                    "retries": trainer.ledger.books.retries,
                    "quarantined": dict(trainer.generation.quarantine.tasks),
                    "weight_version": trainer.coordinator.weight_version,
                }
            summary |= {
                "incarnation": run_dir.incarnation,
                "seconds": round(time.time() - started, 3),
                "observer_failures": dict(observers.failures),
            }
            try:
                await trackers.finish(summary["status"])
            finally:
                summary["tracker_failures"] = trackers.failed
                assembly.is_hung = assembly.is_hung or bool(trackers.hung)
                summary["failures"] = _first_failures(trainer, observers, trackers)
                _write_down(summary, run_dir, progress)
            if summary["optimizer_steps"]:
                _draw(path, progress)
            for line in first_failures.lines(summary["failures"]):
                progress.closing(line)
            if summary["status"] == "interrupted":
                progress.note(f"to continue: rllm-core train --resume --run-dir {path}")
    return summary


def _first_failures(trainer: Trainer | None, observers: Observers, trackers: Trackers) -> list[dict[str, Any]]:
    failures = FirstFailures() if trainer is None else trainer.reporter.failures
    for plugin, first in observers.first_failures.items():
        failures.add("observer", first, count=observers.failures[plugin])
    for name, first in trackers.failed.items():
        failures.add("tracker", first, f"tracker {name!r}")
    return failures.to_list()


def _write_down(summary: dict[str, Any], run_dir: RunDir, progress: Progress) -> None:
    """Writes the summary and closes the folder; a disk error does not hide an earlier error of the run."""
    try:
        try:
            run_dir.write_json("summary.json", summary)
        finally:
            run_dir.close()
    except RunError as error:
        if "error" not in summary:
            raise
        progress.note(str(error))
    finally:
        progress.stop()


def _draw(path: Path, progress: Progress) -> None:
    try:
        if report.plot_reward(path) is None:
            progress.note("no reward.png: pip install 'rllm-core[plots]'")
    except Exception as error:  # a failed plot must not change the outcome of the run
        reason = error.strerror if isinstance(error, OSError) else None
        progress.note(" ".join(f"no reward.png: {reason or f'{type(error).__name__}: {error}'}".split())[:500])


class _Signals:
    """Signal handlers: the first SIGINT or SIGTERM saves and stops the run, a second one exits immediately.

    Signals reach only the main thread of a process, so this does nothing in other threads.

    Attributes:
        trainer: Trainer to interrupt; before it is set, a signal cancels the launch.
        interrupted: Error that the first signal raises.
        is_closing: Whether the run is over and shutting down.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.trainer: Trainer | None = None
        self.interrupted: Interrupted | None = None
        self.is_closing = False
        self._numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def __enter__(self) -> _Signals:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._stop, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            self._loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self.interrupted is not None:
            leave(128 + number)
        self.interrupted = Interrupted(int(number), number.name)
        if self.trainer is not None:
            self.progress.note(f"{number.name} received: saving a checkpoint. Send it again to exit immediately")
            self.trainer.interrupt(self.interrupted)
        elif self.is_closing:
            self.progress.note(f"{number.name} received: shutting down. Send it again to exit immediately")
        elif self._task is not None:
            self._task.cancel()


def _versions(plugins: PluginManager) -> dict[str, Any]:
    from rllm_core.version import __version__

    return {
        "python": platform.python_version(),
        "rllm_core": __version__,
        "plugins": {info.name: f"{info.package} {info.version}" for info in plugins.plugins()},
    }
