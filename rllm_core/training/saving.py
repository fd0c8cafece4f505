"""Saves a run to checkpoints, and resumes it from the latest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_core.backend import checked_state
from rllm_core.errors import RunError
from rllm_core.limits.timeouts import in_thread
from rllm_core.observers import LOAD
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.journal import writing
from rllm_core.training.generation import Generation
from rllm_core.training.run_parts import Position, RunParts


class Saving:
    """Saves the parts of a run to a checkpoint, and restores them from the resumed one."""

    def __init__(self, parts: RunParts, generation: Generation) -> None:
        self.parts = parts
        self.generation = generation
        self.run_dir = parts.run_dir
        self._saved_step: int | None = None
        self._carried: dict[str, dict[str, Any]] = {}  # saved states that no plugin loaded on resume

    async def save(self, position: Position) -> Path | None:
        """Writes a checkpoint and removes old ones; returns its folder, or None if this step already has one.

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
        parts = self.parts
        await parts.backend.save_checkpoint(backend_folder)
        buffered = await in_thread(parts.buffer.write, folder / "buffer.jsonl")
        # After the buffer, so that no plugin state is older than the saved groups.
        answers = {**self._carried, **await parts.observers.save_states(parts.state())}
        backend_state = checked_state(parts.backend, parts.backend.state_dict())
        if not backend_state and not any(backend_folder.rglob("*")):
            raise RunError(
                f"backend {parts.backend.name!r}: save_checkpoint() wrote nothing and state_dict() is empty, so the "
                "run could not be resumed"
            )
        parts.reporter.event("checkpoint", step=position.step)
        state = {
            "step": position.step,
            "incarnation": self.run_dir.incarnation,
            "synced_step": position.synced_step,
            "generation": self.generation.state_dict(buffered),
            "coordinator": parts.coordinator.state_dict(),
            "books": parts.ledger.books_after_restart(buffered),
            "recording": parts.recording.state_dict(),
            "dearest": dict(parts.budget.dearest),
            "validations": [validation.to_dict() for validation in position.validations],
            "backend": backend_state,
            "plugins": {name: answer for name, answer in answers.items() if answer is not None},
            "offsets": self.run_dir.sync(),
        }
        await in_thread(checkpoint.commit, folder, state)
        self._saved_step = position.step
        checkpoint.prune(self.run_dir.checkpoints, parts.config.training.keep_checkpoints)
        return folder

    async def resume(self) -> None:
        """Loads the initial weights of another run, and restores every part from the resumed checkpoint, if given."""
        parts, manifest, folder = self.parts, self.run_dir.manifest, self.run_dir.resumed
        if self.run_dir.initial is not None:
            await parts.backend.load_weights(self.run_dir.initial.folder / "backend")
        if manifest is None or folder is None:
            return
        self._saved_step = manifest["step"]
        generation = manifest["generation"]
        self.generation.load_state_dict(generation)
        parts.recording.load_state_dict(manifest.get("recording", {}))  # missing in manifests of earlier versions
        parts.budget.dearest = manifest.get("dearest", {})  # also missing there
        parts.coordinator.load_state_dict(manifest["coordinator"])
        parts.ledger.restore(
            manifest["books"], generation["due_ordinals"], folder / "buffer.jsonl", generation["buffered_ordinals"]
        )
        if parts.config.training.staleness == "strict" and manifest["synced_step"] != manifest["step"]:
            # These weights now go live early, so groups sampled before would exceed the strict staleness limit.
            parts.ledger.cancel_complete("restart")
        parts.backend.load_state_dict(manifest["backend"])
        await parts.backend.load_checkpoint(folder / "backend")
        await self._load_plugin_states(manifest.get("plugins", {}), folder)  # missing in manifests of earlier versions
        # Checkpoints that the previous launch was killed before removing.
        checkpoint.prune(self.run_dir.checkpoints, parts.config.training.keep_checkpoints)

    async def _load_plugin_states(self, saved: dict[str, dict[str, Any]], folder: Path) -> None:
        observers, note = self.parts.observers, self.parts.progress.note
        taken = await observers.load_states(self.parts.state(), saved)
        self._carried = {name: state for name, state in saved.items() if name not in taken}
        able = observers.names(LOAD)
        for name in self._carried:
            why = "did not load it" if name in able else "is missing, disabled or has no load_plugin_state"
            note(f"{folder.name} has saved state of plugin {name!r}, which {why}; later checkpoints keep it")
        for name in sorted(set(able) - saved.keys()):
            note(f"{folder.name} has no saved state of plugin {name!r}, which starts without it")
