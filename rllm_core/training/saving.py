"""Saves a run to checkpoints, and resumes it from the latest one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rllm_core.backend import BackendProtocol
from rllm_core.config import RunConfig
from rllm_core.events import TrainerState
from rllm_core.limits.timeouts import in_thread, within
from rllm_core.observers import LOAD, Observers
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.journal import writing
from rllm_core.run_folder.reporting import Reporter
from rllm_core.run_folder.results import ValidationResult
from rllm_core.training.books import Books
from rllm_core.training.buffer import TrajectoryGroupBuffer
from rllm_core.training.coordinator import SyncCoordinator
from rllm_core.training.generation import Generation

ResultT = TypeVar("ResultT")


@dataclass
class Position:
    """Progress of a run.

    Attributes:
        step: Optimizer steps done.
        synced_step: Step whose weights are live in the engine.
        validations: Validation results so far.
    """

    step: int = 0
    synced_step: int = 0
    validations: list[ValidationResult] = field(default_factory=list)

    @classmethod
    def saved_in(cls, manifest: dict[str, Any] | None) -> Position:
        """Returns the position saved in a manifest; the initial one if there is none."""
        if manifest is None:
            return cls()
        validations = [ValidationResult(**validation) for validation in manifest["validations"]]
        return cls(manifest["step"], manifest["synced_step"], validations)


class Saving:
    """Saves the parts of a run to a checkpoint, and restores them from the resumed one.

    Args:
        config: Resolved run file.
        run_dir: Run folder, with the checkpoint to resume.
        backend: Backend, which saves and loads its own files.
        coordinator: Weight version, and position in the sync window.
        buffer: Complete groups that wait.
        generation: Position in the task stream.
        books: Rollout accounting.
        reporter: Reporter for the event.
        observers: Plugins whose state goes into the manifest.
        state: Returns a snapshot for hooks.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run_dir: RunDir,
        backend: BackendProtocol[Any],
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
        generation: Generation,
        books: Books,
        reporter: Reporter,
        observers: Observers,
        state: Callable[[], TrainerState],
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.backend = backend
        self.coordinator = coordinator
        self.buffer = buffer
        self.generation = generation
        self.books = books
        self.reporter = reporter
        self.observers = observers
        self._state = state
        self._saved_step: int | None = None
        self._carried: dict[str, dict[str, Any]] = {}  # saved states that no plugin loaded on resume

    async def save(self, position: Position) -> Path | None:
        """Writes a checkpoint and removes old ones.

        Returns:
            Folder of the checkpoint; None if this step already has one.

        Raises:
            RunError: If the checkpoint cannot be written.
        """
        if self._saved_step == position.step:
            return None
        with writing(checkpoint.step_folder(self.run_dir.checkpoints, position.step)):
            return await self._write(position)

    async def _write(self, position: Position) -> Path:
        folder = checkpoint.begin(self.run_dir.checkpoints, position.step)
        backend_folder = folder / "backend"
        backend_folder.mkdir()
        await self._backend("save_checkpoint", self.backend.save_checkpoint(backend_folder))
        buffered = await in_thread(self.buffer.write, folder / "buffer.jsonl")
        # After the buffer, so that no plugin state is older than the saved groups.
        answers = {**self._carried, **await self.observers.save_states(self._state())}
        self.reporter.event("checkpoint", step=position.step)
        state = {
            "step": position.step,
            "incarnation": self.run_dir.incarnation,
            "synced_step": position.synced_step,
            "generation": self.generation.state_dict(buffered),
            "coordinator": self.coordinator.state_dict(),
            "books": self.books.state_after_restart(len(buffered) * self.config.training.rollouts_per_group),
            "validations": [validation.to_dict() for validation in position.validations],
            "backend": self.backend.state_dict(),
            "plugins": {name: answer for name, answer in answers.items() if answer is not None},
            "offsets": self.run_dir.sync(),
        }
        await in_thread(checkpoint.commit, folder, state)
        self._saved_step = position.step
        checkpoint.prune(self.run_dir.checkpoints, self.config.training.keep_checkpoints)
        return folder

    async def resume(self) -> None:
        """Restores every part from the resumed checkpoint, if there is one."""
        manifest, folder = self.run_dir.manifest, self.run_dir.resumed
        if manifest is None or folder is None:
            return
        self._saved_step = manifest["step"]
        self.generation.load_state_dict(manifest["generation"])
        self.coordinator.load_state_dict(manifest["coordinator"])
        self.books.load_state_dict(manifest["books"])
        self.generation.restore_buffer(folder / "buffer.jsonl", manifest["generation"])
        if self.config.training.staleness == "strict" and manifest["synced_step"] != manifest["step"]:
            # These weights now go live early, so groups sampled before would exceed the strict staleness limit.
            self.generation.discard("restart")
        self.backend.load_state_dict(manifest["backend"])
        await self._backend("load_checkpoint", self.backend.load_checkpoint(folder / "backend"))
        await self._load_plugin_states(manifest.get("plugins", {}), folder)  # missing in manifests of earlier versions
        # Checkpoints that the previous launch was killed before removing.
        checkpoint.prune(self.run_dir.checkpoints, self.config.training.keep_checkpoints)

    async def _load_plugin_states(self, saved: dict[str, dict[str, Any]], folder: Path) -> None:
        taken = await self.observers.load_states(self._state(), saved)
        self._carried = {name: state for name, state in saved.items() if name not in taken}
        able = self.observers.names(LOAD)
        for name in self._carried:
            why = "did not load it" if name in able else "is missing, disabled or has no load_plugin_state"
            self.reporter.progress.note(
                f"{folder.name} has saved state of plugin {name!r}, which {why}; later checkpoints keep it"
            )
        for name in sorted(set(able) - saved.keys()):
            self.reporter.progress.note(f"{folder.name} has no saved state of plugin {name!r}, which starts without it")

    async def _backend(self, method: str, call: Awaitable[ResultT]) -> ResultT:
        limit = self.config.training.backend_timeout_seconds
        return await within(limit, f"{method} of backend {self.config.backend!r}", call)
