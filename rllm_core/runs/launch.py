"""Launches a run: trains with the parts that were assembled, and writes the summary."""

from __future__ import annotations

import asyncio
import gc
import platform
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rllm_core.assembly.parts import Parts
from rllm_core.assembly.scorer import asks_start, open_scorer_engine
from rllm_core.assembly.teacher import open_teacher
from rllm_core.config import RunConfig
from rllm_core.errors import RunError, UserError
from rllm_core.file_references import CLASS_PREFIX, is_class_reference
from rllm_core.hosts.contract import RolloutHost
from rllm_core.limits.backend_timeouts import with_timeouts
from rllm_core.limits.blocking_calls import noting_blocking_calls
from rllm_core.limits.guard import Guard
from rllm_core.limits.timeouts import close_within, within
from rllm_core.moved import moved_names
from rllm_core.observers import CLOSING, Observers
from rllm_core.plugins import PluginManager
from rllm_core.plugins.blame import blamed
from rllm_core.run_folder import first_failures
from rllm_core.run_folder.first_failures import FirstFailures
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.logging_again import log_again
from rllm_core.run_folder.progress import Harmless, Progress
from rllm_core.run_folder.tracking import Trackers
from rllm_core.runs.signals import Signals
from rllm_core.training.accounting import Books
from rllm_core.training.run_parts import RunParts
from rllm_core.training.stopping import Interrupted
from rllm_core.training.trainer import Trainer
from rllm_core.workflow import Workflow

SHUTDOWN_TIMEOUT_SECONDS = 60.0  # for the backend
WORKERS_FOLDER = "workers"  # in the run folder; output of lost workers
CLOSING_TIMEOUT_SECONDS = 10.0  # for the workflow, and for its services

__getattr__ = moved_names(__name__)


@asynccontextmanager
async def opened(
    host: RolloutHost | Workflow,
    config: RunConfig,
    note: Callable[[str], None],
    *,
    settled: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> AsyncIterator[None]:
    """Opens a workflow for all rollouts, and closes it and its services even after an error.

    Args:
        host: Host of the workflow; or the workflow, to open it in this process.
        config: Run file, for the timeout.
        note: Called with a message if closing fails, which does not fail the run.
        settled: See `RolloutHost.open`.
        folder: See `RolloutHost.open`.

    Raises:
        StallError: If opening times out.
    """
    if isinstance(host, RolloutHost):
        services, opening = host.hosted.workflow.services, host.open(note=note, settled=settled, folder=folder)
    else:
        services, opening = host.services, host.open()
    try:
        what = f"open() of workflow {config.workflow!r}"
        await within(config.training.backend_timeout_seconds, what, opening)
        yield
    finally:
        for what, close in (
            (f"close() of workflow {config.workflow!r}", host.close),
            ("close() of its services", services.close),
        ):
            await close_within(CLOSING_TIMEOUT_SECONDS, what, close, note)


async def train(
    assembly: Parts, path: Path, *, resume: bool, progress: Progress, guard: Guard | None = None
) -> dict[str, Any]:
    """Trains in the folder ``path`` and returns the content of its ``summary.json``.

    Args:
        assembly: Parts of the run.
        path: Run folder.
        resume: Whether to continue the run in the folder.
        progress: Progress display.
        guard: Guard that ends the process if its event loop is blocked; None if the process has other work.

    Raises:
        Interrupted: After SIGINT, SIGTERM or SIGHUP, and when the budget is spent; the run can be resumed.
        UserError: If the run failed for a reason that its message explains.
    """
    progress = Harmless(progress)
    sources, keeps_start = assembly.sources, asks_start(assembly.scorer)
    run_dir = RunDir(path, assembly.config, resume=resume, sources=sources, keeps_start=keeps_start)
    signals = Signals(progress)
    with signals, guard or nullcontext():
        launch = _Launch(assembly, run_dir, signals, progress)
        await launch.train(restarted=resume and run_dir.manifest is None)
    return launch.summary


class _Launch:
    """One launch of a run, and its summary."""

    def __init__(self, assembly: Parts, run_dir: RunDir, signals: Signals, progress: Progress) -> None:
        self.assembly = assembly
        self.config = run_dir.config
        self.run_dir = run_dir
        self.signals = signals
        self.progress = progress
        self.observers = Observers(assembly.plugins)
        self.trackers = Trackers(assembly.trackers, note=progress.note)
        self.trainer: Trainer | None = None
        self.failures = FirstFailures()
        self.started = time.time()
        self.summary: dict[str, Any] = {
            "status": "failed",
            "stopped_by": None,
            "optimizer_steps": 0,
            "planned_steps": self.config.training.steps,
            "resumed_from_step": run_dir.manifest["step"] if run_dir.manifest else None,
            "validation": [],
            "books": Books().totals(),
        }

    async def train(self, *, restarted: bool) -> None:
        """Trains; ``restarted`` means that there was no checkpoint to resume from."""
        config, assembly, run_dir, progress = self.config, self.assembly, self.run_dir, self.progress
        async with AsyncExitStack() as at_end:  # closes in reverse order, even if something fails
            at_end.push_async_callback(self._conclude)
            at_end.push_async_callback(lambda: self.trackers.finish(self.summary["status"]))
            at_end.callback(self._count)
            at_end.push_async_callback(self._shut_down)
            at_end.callback(self.signals.close)
            at_end.enter_context(self._outcome())

            launches, versions = run_dir.read_json("plugins.json") or [], _versions(assembly.plugins)
            run_dir.write_json("plugins.json", [*launches, versions])
            run_dir.keep_sources(assembly.sources)
            at_end.callback(lambda: run_dir.keep_sources(assembly.sources))  # also those loaded during the run
            progress.start(config, run_dir.named, self.summary["resumed_from_step"] or 0)
            if config.training.trajectories_per_step:
                progress.note(
                    "training.trajectories_per_step is deprecated; use training.groups_kept_per_step, which records "
                    "groups"
                )
            if restarted:
                progress.note(f"{run_dir.named} has no complete checkpoint: restarting at step 0")
            if launches and (changed := _changed(launches[-1], versions)):
                progress.note(f"changed since the previous launch: {', '.join(changed)}")
            self.trackers.start(config, str(run_dir.path))
            log_again(run_dir, self.trackers)
            model = f" with model {config.model.path}" if config.model.path else ""
            progress.waiting(f"starting backend {config.backend!r}{model}")
            engine = await assembly.engine()
            at_end.enter_context(rare_collections())
            teacher = await at_end.enter_async_context(open_teacher(assembly.resolved, engine.parser))
            scorer_engine = await at_end.enter_async_context(
                open_scorer_engine(assembly.resolved, assembly.scorer, assembly.backend)
            )
            parts = RunParts(
                config=config,
                host=assembly.host,
                tasks=assembly.tasks,
                sampler=assembly.sampler,
                backend=with_timeouts(assembly.backend, config),
                engine=engine,
                algorithm=assembly.algorithm,
                observers=self.observers,
                run_dir=run_dir,
                progress=progress,
                trackers=self.trackers,
                teacher=teacher,
                scorer=assembly.scorer,
                scorer_engine=scorer_engine,
                waits_for_others=assembly.resolved.workflow.record.waits_for_others,
            )
            settled, workers = parts.runner.merger.settled, run_dir.path / WORKERS_FOLDER
            opening = opened(assembly.host, config, progress.note, settled=settled, folder=workers)
            progress.waiting(f"opening workflow {config.workflow!r}")
            await at_end.enter_async_context(opening)
            if parts.scoring is not None:
                await at_end.enter_async_context(parts.scoring.opened())
            progress.waiting("loading weights into the engine")
            if assembly.host.runs_elsewhere:
                progress.note(f"rollouts run in {assembly.host.report().where}")
            at_end.enter_context(noting_blocking_calls(progress.note))
            self.trainer = self.signals.trainer = Trainer(parts)
            await self.trainer.run()

    @contextmanager
    def _outcome(self) -> Iterator[None]:
        """Records how the run ends."""
        summary, signals = self.summary, self.signals
        try:
            yield
            summary["status"] = "completed"
        except Interrupted as error:
            summary |= {"status": "interrupted", "error": str(error), "stopped_by": error.by}
            raise
        except asyncio.CancelledError as error:
            if signals.interrupted is None:
                summary["error"] = "cancelled"
                raise
            summary |= {"status": "interrupted", "error": str(signals.interrupted), "stopped_by": "signal"}
            raise signals.interrupted from error
        except BaseException as error:
            summary["error"] = f"{type(error).__name__}: {error}" if isinstance(error, UserError) else blamed(error)
            raise

    async def _shut_down(self) -> None:
        what = f"shutdown of backend {self.config.backend!r}"
        if not await close_within(SHUTDOWN_TIMEOUT_SECONDS, what, self.assembly.backend.shutdown, self.progress.note):
            self.assembly.left_running.append(f"backend {self.config.backend!r}")

    def _count(self) -> None:
        """Completes the summary, and writes it before the wait for the trackers, which a second signal may end."""
        trainer = self.trainer
        if trainer is not None:
            self.failures = trainer.reporter.failures
            position, books = trainer.parts.position, trainer.ledger.books
            self.summary |= {
                "optimizer_steps": position.step,
                "validation": [validation.to_dict() for validation in position.validations],
                "books": books.totals(),
                "books_by_reason": books.by_reason(),
                "retries": books.retries,
                "costs": trainer.parts.costs.summary(),
                "quarantined": dict(trainer.generation.quarantine.tasks),
                "weight_version": trainer.coordinator.weight_version,
            }
        for plugin, first in self.observers.first_failures.items():
            self.failures.add("observer", first, count=self.observers.failures[plugin])
        host = self.assembly.host.report()
        self.summary |= {
            "rollout_host": {"name": self.config.rollout.host, **asdict(host)},
            "incarnation": self.run_dir.incarnation,
            "seconds": round(time.time() - self.started, 3),
            "observer_failures": dict(self.observers.failures),
            "tracker_failures": self.trackers.failed.copy(),  # their threads may change it
            "failures": self.failures.to_list(),
        }
        with suppress(RunError):  # `_write_down` tries again, and reports it
            self.run_dir.write_json("summary.json", self.summary)

    async def _conclude(self) -> None:
        """Writes the summary again, with the trackers, and reports how to continue."""
        summary, progress = self.summary, self.progress
        self.assembly.left_running.extend(self.trackers.hung)
        for name, first in self.trackers.failed.items():
            self.failures.add("tracker", first, f"tracker {name!r}")
        summary |= {"tracker_failures": self.trackers.failed, "failures": self.failures.to_list()}
        self._write_down()
        for line in first_failures.lines(summary["failures"]):
            progress.closing(line)
        for line in await self.observers.lines(CLOSING, run_dir=self.run_dir.named, summary=summary):
            progress.closing(line)
        if summary["status"] == "interrupted":
            progress.note(f"to continue: {how_to_continue(self.config.workflow, self.run_dir.named)}")

    def _write_down(self) -> None:
        """Writes the summary and closes the folder; a disk error does not hide an earlier error of the run."""
        try:
            try:
                self.run_dir.write_json("summary.json", self.summary)
            finally:
                self.run_dir.close()
        except RunError as error:
            if "error" not in self.summary:
                raise
            self.progress.note(str(error))
        finally:
            self.progress.stop()


def how_to_continue(workflow: str, path: Path) -> str:
    """Returns the command or the call that resumes a run."""
    if is_class_reference(workflow):
        return f"rllm_core.train({workflow.removeprefix(CLASS_PREFIX)}, run_dir={str(path)!r}, resume=True)"
    return f"rllm-core train --resume --run-dir {shlex.quote(str(path))}"


@contextmanager
def rare_collections() -> Iterator[None]:
    """Keeps garbage collections short.

    The half a million objects imported and allocated so far stay alive, so no collection needs to walk them again. A
    collection blocks the event loop while it walks its generation, about 3 ms for as many young objects as some hundred
    rollouts hold. Rollouts create hardly any reference cycles, and the trainer collects them after every step, so
    collections of the oldest generation can be rare. What a program has frozen before it starts a run stays frozen.
    """
    thresholds = gc.get_threshold()
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(25_000, 1, 300)
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
        gc.set_threshold(*thresholds)


def _versions(plugins: PluginManager) -> dict[str, Any]:
    from rllm_core.version import __version__

    return {
        "python": platform.python_version(),
        "rllm_core": __version__,
        "plugins": {info.name: f"{info.package} {info.version}" for info in plugins.plugins()},
    }


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the versions that differ from those of an earlier launch; a plugin may be in no package."""
    old, new = ({"python": f"Python {versions['python']}", **versions["plugins"]} for versions in (before, now))
    return [
        f"{was.strip() or name} -> {new.get(name, 'not installed').strip() or name}"
        for name, was in old.items()
        if new.get(name) != was
    ]
