"""The run folder: what is in it, who may write to it.

::

    run.toml              the resolved run file
    plugins.json          versions of Python, the core and every plugin, one entry per start
    metrics.jsonl         one object per optimizer step; the same seed and file give the same bytes
    timings.jsonl         seconds and tokens per second of each step, which no seed reproduces
    events.jsonl          what happened to every rollout, group, step, synchronisation and checkpoint
    trajectories.jsonl    some episodes of each step and validation, whole
    summary.json          how it ended
    reward.png            the reward over the steps (extra ``[plots]``)
    checkpoints/step-NNNNNN/manifest.json
    lost/N/               lines that start N wrote after the checkpoint that start N + 1 resumed from
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tomllib
from pathlib import Path
from typing import IO, Any

from rllm_core.config import RunConfig, to_toml
from rllm_core.errors import ConfigError, RunError
from rllm_core.training import checkpoint
from rllm_core.training.journal import JsonLines, cut_after, writing

LINES = ("events", "metrics", "timings", "trajectories")
# Keys that may differ between a run and its continuation, because nothing already trained depends on them.
RESUMABLE = frozenset(
    {
        ("training", "checkpoint_every_steps"),
        ("training", "keep_checkpoints"),
        ("training", "validate_every_steps"),
        ("training", "trajectories_per_step"),
        ("training", "trackers"),
        ("training", "buffer_max_bytes"),
        ("training", "buffer_spill"),
        ("training", "stall_timeout_seconds"),
        ("training", "backend_timeout_seconds"),
        ("training", "sync_timeout_seconds"),
        ("rollout", "rollout_timeout_seconds"),
        ("rollout", "max_attempts"),
        ("rollout", "request_timeout_seconds"),
        ("rollout", "max_request_attempts"),
        ("rollout", "max_consecutive_failures"),
        ("rollout", "max_failure_share"),
        ("rollout", "quarantine_after_groups"),
    }
)


class RunDir:
    """An opened run folder; one process at a time.

    Attributes:
        path: The folder.
        incarnation: Number of this start, from 0.
        resumed: The checkpoint this start continues, or None.
    """

    def __init__(self, path: Path, config: RunConfig, *, resume: bool) -> None:
        """Open or create a run folder.

        Args:
            path: The folder; it may exist if it is empty.
            config: The resolved run file.
            resume: Continue what is in the folder.

        Raises:
            ConfigError: If it cannot be written, holds another run, or holds none to resume.
        """
        self.path = path
        self.resumed: Path | None = None
        self.manifest: dict[str, Any] | None = None
        self.incarnation = 0
        self.lines: dict[str, JsonLines] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            holds_run = (path / "run.toml").exists()
            if not holds_run and any(entry.name not in (".lock", ".run.toml.tmp") for entry in path.iterdir()):
                raise ConfigError(f"run folder {path} is not empty and holds no run; choose another --run-dir")
            if holds_run and not resume:
                raise ConfigError(f"run folder {path} already holds a run; add --resume or choose another --run-dir")
            if resume and not holds_run:
                raise ConfigError(f"run folder {path} holds no run to resume; leave out --resume")
            self._lock = self._take_lock()
            try:
                if resume:
                    self._continue(config)
                self._write_whole("run.toml", to_toml(config.to_tables()))
                for name in LINES:
                    self.lines[name] = JsonLines(path / f"{name}.jsonl")
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise ConfigError(f"run folder {path} cannot be written: {error.strerror or error}") from error

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file whole or not at all.

        Raises:
            RunError: If the disk refuses.
        """
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        with writing(self.path / name):
            self._write_whole(name, text)

    def _write_whole(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / name)

    def read_json(self, name: str) -> Any:
        """Read a JSON file, None if it is not there."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        for lines in self.lines.values():
            lines.flush()

    def sync(self) -> dict[str, int]:
        """Put all lines on the disk and return the files' lengths in bytes."""
        return {name: lines.sync() for name, lines in self.lines.items()}

    def close(self) -> None:
        """Close all files and give the folder back, even if the disk refuses the last lines.

        Raises:
            RunError: If it does.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._lock.close)
            for lines in self.lines.values():
                closing.callback(lines.close)

    def _take_lock(self) -> IO[str]:
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"run folder {self.path} is in use by another process") from None
        return lock

    def _continue(self, config: RunConfig) -> None:
        before = tomllib.loads((self.path / "run.toml").read_text(encoding="utf-8"))
        changed = _changed_keys(
            before, tomllib.loads(to_toml(config.to_tables())), ignored=_of_trackers(before, config)
        )
        if changed:
            raise ConfigError(
                f"run folder {self.path} was made with another run file; these differ: {', '.join(changed)}. "
                "Resume with the same file, or start a new run"
            )
        starts = self.read_json("plugins.json") or []
        self.incarnation = len(starts)
        complete = checkpoint.complete(self.checkpoints)
        if complete:
            self.resumed = complete[-1]
            self.manifest = checkpoint.read(self.resumed)
        offsets = self.manifest["offsets"] if self.manifest is not None else dict.fromkeys(LINES, 0)
        lost = self.path / "lost" / str(self.incarnation - 1)
        (self.path / "summary.json").unlink(missing_ok=True)  # an earlier start's, about what is cut off now
        for name in reversed(LINES):
            try:
                cut_after(self.path / f"{name}.jsonl", offsets[name], lost / f"{name}.jsonl")
            except ValueError as error:
                raise RunError(f"run folder {self.path} cannot be resumed: {error}") from error


def _of_trackers(before: dict[str, Any], config: RunConfig) -> frozenset[str]:
    """The sections of trackers then and now: which there are may change, and how they are set with it."""
    trackers = {*before.get("training", {}).get("trackers", ()), *config.training.trackers}
    return frozenset(trackers - {config.workflow, config.backend, config.parser})


def _changed_keys(
    before: dict[str, Any], now: dict[str, Any], path: tuple[str, ...] = (), *, ignored: frozenset[str] = frozenset()
) -> list[str]:
    changed = []
    for key in sorted((before.keys() | now.keys()) - ignored):
        old, new, here = before.get(key), now.get(key), (*path, key)
        if isinstance(old, dict) or isinstance(new, dict):
            changed += _changed_keys(old or {}, new or {}, here)
        elif old != new and here not in RESUMABLE:
            changed.append(".".join(here))
    return changed
