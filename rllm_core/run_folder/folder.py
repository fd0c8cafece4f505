"""Run folder: its files, and exclusive access to it.

::

    run.toml              the resolved run file
    plugins.json          versions of Python, the core and every plugin, one entry per launch
    metrics.jsonl         one object per optimizer step; the same seed and file give the same bytes
    timings.jsonl         seconds and tokens per second of each step, which differ from run to run
    costs.jsonl           costs of every rollout, scored group and step
    events.jsonl          events of every rollout, group, step, weight sync and checkpoint
    groups.jsonl          some whole groups of each step and validation; three files beside it belong to it
                          (`rllm_core.run_folder.recorded`)
    trajectories.jsonl    some complete episodes of each step and validation, if the run file asks for them
    initial.json          the checkpoint of another run that the initial weights come from
    summary.json          status and totals at the end of the run
    files.json, files/    copies of the user's files with code of the run
    reward.png            the reward over the steps (rllm-viewer, extra ``[plots]``)
    checkpoints/step-NNNNNN/manifest.json
    lost/N/               lines that launch N wrote after the checkpoint that launch N + 1 resumed from
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rllm_core.config import RunConfig, to_toml
from rllm_core.errors import ConfigError, RunError
from rllm_core.file_references import CLASS_PREFIX, is_class_reference
from rllm_core.plugins.classes import source_of
from rllm_core.run_folder import checkpoint, initial
from rllm_core.run_folder.journal import JsonLines, check_size, cut_after, read_json, write_whole, writing
from rllm_core.run_folder.recorded import COSTS, GROUPS, INDEX, TIMINGS, TOKENS
from rllm_core.run_folder.resuming import changed_keys, check_steps, new_run

FILES = "files.json"
LINES = ("events", "metrics", "timings", "trajectories", COSTS, GROUPS, INDEX, TIMINGS, TOKENS)


class RunDir:
    """An open run folder, locked by one process at a time.

    Attributes:
        path: Run folder. Absolute, because an environment may change the working directory.
        named: Run folder as the user named it, for messages.
        initial: Weights of another run that this launch needs, or None.
        incarnation: Number of this launch, from 0.
        resumed: Checkpoint that this launch resumes, or None.
        was_killed: Whether this launch resumes one that did not end by itself.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        *,
        resume: bool,
        sources: Sequence[str] = (),
        keeps_start: bool = False,
    ) -> None:
        """Opens or creates a run folder.

        Args:
            path: Run folder; if it exists, it must be empty unless resuming.
            config: Resolved run file.
            resume: Whether to continue the run in the folder.
            sources: Files and classes of the user with code of the run (`rllm_core.assembly.parts.Parts.sources`).
            keeps_start: Whether every launch needs the initial weights, as it does for a reference policy.

        Raises:
            ConfigError: If the folder cannot be written, contains another run or is inside one, or has no run to
                resume, or a source has changed since the run was started, or its initial weights do not fit.
            RunError: If a checkpoint that it needs is damaged.
        """
        self.path, self.named = path.absolute(), path
        self.config = config if resume else initial.with_step(config)
        self.initial = None if resume else initial.checked(self.config)
        self.resumed: Path | None = None
        self.manifest: dict[str, Any] | None = None
        self.incarnation = 0
        self.was_killed = False
        self.lines: dict[str, JsonLines] = {}
        outer = next(filter(is_run_folder, self.path.parents), None)
        if outer is not None and not resume:  # pruning a checkpoint would delete a run inside it
            raise ConfigError(f"run folder {path} is inside the run folder {outer}; choose one outside it")
        try:
            path.mkdir(parents=True, exist_ok=True)
            holds_run = (path / "run.toml").exists()
            if not holds_run and any(entry.name not in (".lock", ".run.toml.tmp") for entry in path.iterdir()):
                raise ConfigError(f"run folder {path} is not empty and holds no run; choose another one")
            if holds_run and not resume:
                raise ConfigError(
                    f"run folder {path} already holds a run; add --resume (in Python, resume=True) "
                    "or choose another one"
                )
            if resume and not holds_run:
                raise ConfigError(
                    f"run folder {path} holds no run to resume; leave out --resume (in Python, resume=True)"
                )
            self._lock = self._take_lock()
            try:
                self._reject_changed(sources)
                if resume:
                    self._continue(config, keeps_start)
                write_whole(path / "run.toml", to_toml(self.config.to_tables()))
                if self.initial is not None:
                    self.write_json(initial.FILE, self.initial.to_json())
                for name in LINES:
                    self.lines[name] = JsonLines(self.path / f"{name}.jsonl")
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise ConfigError(f"run folder {path} cannot be written: {error.strerror or error}") from error

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_json(self, name: str, content: Any) -> None:
        """Writes a JSON file atomically.

        Raises:
            RunError: If the file cannot be written.
        """
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        with writing(self.path / name):
            write_whole(self.path / name, text)

    def read_json(self, name: str) -> Any:
        """Reads a JSON file; None if it does not exist.

        Raises:
            RunError: If the file is damaged.
        """
        return read_json(self.path / name, self.named / name)

    def sync(self) -> dict[str, int]:
        """Syncs all lines to disk and returns the files' lengths in bytes."""
        return {name: lines.sync() for name, lines in self.lines.items()}

    def close(self) -> None:
        """Closes all files and unlocks the folder, even if the last lines cannot be written.

        Raises:
            RunError: If they cannot be written.
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
            raise ConfigError(f"run folder {self.named} is in use by another process") from None
        return lock

    def keep_sources(self, sources: Sequence[str]) -> None:
        """Copies the user's files and classes with code of the run to the folder; existing copies stay as they are."""
        known: dict[str, dict[str, str]] = self.read_json(FILES) or {}
        new = {source: content for source in sources if source not in known and (content := _content(source))}
        for source, content in new.items():
            taken = {entry["copy"] for entry in known.values()}
            numbers = itertools.chain([""], map("-{}".format, itertools.count(2)))
            stem = Path(source.removeprefix(CLASS_PREFIX)).stem
            copy = next(name for name in (f"files/{stem}{number}.py" for number in numbers) if name not in taken)
            with writing(self.path / copy):
                (self.path / "files").mkdir(exist_ok=True)
                (self.path / copy).write_bytes(content)
            known[source] = {"sha256": hashlib.sha256(content).hexdigest(), "copy": copy}
        if new:
            self.write_json(FILES, known)

    def _reject_changed(self, sources: Sequence[str]) -> None:
        known: dict[str, dict[str, str]] = self.read_json(FILES) or {}
        for source in sources:
            entry = known.get(source)
            if entry is not None and entry["sha256"] != hashlib.sha256(_content(source)).hexdigest():
                raise ConfigError(
                    f"{source} has changed since the run in {self.named} was started; restore it from "
                    f"{self.named / entry['copy']}, or start a new run"
                )

    def _continue(self, config: RunConfig, keeps_start: bool) -> None:
        run_file = self.path / "run.toml"
        self.config = config = initial.with_step_of(run_file, config)
        changed = changed_keys(run_file, config)
        if changed:
            raise ConfigError(
                f"run folder {self.named} was started with a different run file; these keys differ: "
                f"{', '.join(changed)}. Resume without naming a workflow, a run file or these keys, or "
                f"{new_run(self.named)}"
            )
        starts = self.read_json("plugins.json") or []
        self.incarnation = len(starts)
        complete = checkpoint.complete(self.checkpoints)
        if complete:
            self.resumed = complete[-1]
            self.manifest = checkpoint.read(self.resumed)
        check_steps(run_file, config, self.manifest["step"] if self.manifest is not None else 0)
        if self.manifest is None or keeps_start or config.algorithm.kl.coefficient > 0:
            # They are also the weights of the reference policy, and of a judge that is not trained.
            self.initial = initial.checked(config, self.read_json(initial.FILE))
        offsets = self.manifest["offsets"] if self.manifest is not None else dict.fromkeys(LINES, 0)
        lines = [(f"{name}.jsonl", offsets.get(name, 0)) for name in reversed(LINES)]  # earlier versions had fewer
        try:  # before any of them is changed
            if self.manifest is not None and self.incarnation <= self.manifest["incarnation"]:
                raise ValueError(
                    f"plugins.json lacks launch {self.manifest['incarnation']}, which saved the checkpoint"
                )
            for name, offset in lines:
                check_size(self.path / name, offset)
        except ValueError as error:
            raise RunError(
                f"run folder {self.named} cannot be resumed: {error}; restore the file, or {new_run(self.named)}"
            ) from error
        lost = self.path / "lost" / str(self.incarnation - 1)
        self.was_killed = not (self.path / "summary.json").exists()
        # It is from the previous launch, including steps that are truncated now.
        (self.path / "summary.json").unlink(missing_ok=True)
        for name, offset in lines:
            cut_after(self.path / name, offset, lost / name)


def is_run_folder(path: Path) -> bool:
    """Whether a folder holds the files of a run. A user's own folder may have a run.toml."""
    return all((path / name).is_file() for name in ("run.toml", "events.jsonl"))


def _content(source: str) -> bytes:
    """Returns the code of a source; empty for a file that does not exist, such as one of a container's command."""
    if is_class_reference(source):
        return source_of(source).encode()
    return Path(source).read_bytes() if Path(source).is_file() else b""
