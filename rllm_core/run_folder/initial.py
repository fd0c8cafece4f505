"""Initial weights from a checkpoint of another run: ``training.init_from``."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.run_folder import checkpoint

FILE = "initial.json"
_REFERENCE = re.compile(r"(?P<run>.+?)(:(?P<step>\d+))?", re.DOTALL)


@dataclass(frozen=True)
class InitialWeights:
    """A complete checkpoint of another run.

    Attributes:
        step: Number of optimizer steps after which the checkpoint was saved.
    """

    run: Path
    step: int

    @classmethod
    def named(cls, reference: str) -> InitialWeights:
        """Finds the checkpoint ``RUN:STEP``, or the latest one of ``RUN``.

        Raises:
            ConfigError: If there is no such checkpoint.
        """
        run, step = _split(reference)
        if not (run / "run.toml").is_file():
            raise ConfigError(f"training.init_from = {reference!r}: {run} is not a run folder; name one, or RUN:STEP")
        folders = checkpoint.complete(run / "checkpoints")
        steps = [int(folder.name.removeprefix("step-")) for folder in folders]
        if not steps:
            raise ConfigError(f"training.init_from = {reference!r}: run folder {run} has no complete checkpoint")
        if step is not None and step not in steps:
            raise ConfigError(
                f"training.init_from = {reference!r}: run folder {run} has no checkpoint of step {step}, but of "
                f"{', '.join(map(str, steps))}"
            )
        return cls(run.absolute(), steps[-1] if step is None else step)

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        return checkpoint.step_folder(self.run / "checkpoints", self.step)

    def check(self, config: RunConfig) -> None:
        """Checks that the weights belong to the backend and the model of a run, and every file of the checkpoint.

        Raises:
            ConfigError: If they belong to another backend or model.
            RunError: If the checkpoint is damaged.
        """
        source: dict[str, Any] = tomllib.loads((self.run / "run.toml").read_text(encoding="utf-8"))
        before, now = source.get("backend", "local"), config.backend
        if before.rpartition("/")[2] != now.rpartition("/")[2]:
            raise ConfigError(
                f"training.init_from: the checkpoints of {self.run} were saved by backend {before!r}, but this run "
                f"uses {now!r}; use the same backend, or export the model (rllm-core export-model) and set model.path "
                "to it"
            )
        before, now = source.get("model", {}).get("path", ""), config.model.path
        if before != now:
            raise ConfigError(
                f"training.init_from: {self.run} trains model.path = {before!r}, and this run has {now!r}; use the "
                "same model, or export the trained one (rllm-core export-model) and set model.path to it"
            )
        checkpoint.check_backend_files(self.folder, checkpoint.read(self.folder))

    def to_json(self) -> dict[str, Any]:
        """Returns the content of ``initial.json``."""
        digest = hashlib.sha256((self.folder / checkpoint.MANIFEST).read_bytes()).hexdigest()
        return {"run": str(self.run), "step": self.step, "manifest_sha256": digest}

    def __str__(self) -> str:
        return f"{self.run}:{self.step}"


def with_step(config: RunConfig) -> RunConfig:
    """Returns a run file whose ``training.init_from``, if set, names the step of an existing checkpoint.

    Raises:
        ConfigError: If the checkpoint does not exist.
    """
    reference = config.training.init_from
    return config if reference is None else _with_reference(config, str(InitialWeights.named(reference)))


def with_step_of(run_file: Path, config: RunConfig) -> RunConfig:
    """Returns a run file for a resume; if it names no step, it gets the step in the run's own run file."""
    known: dict[str, Any] = tomllib.loads(run_file.read_text(encoding="utf-8")).get("training", {})
    before, now = known.get("init_from"), config.training.init_from
    if before is None or now is None or _split(before)[0] != Path(now):
        return config
    return _with_reference(config, before)


def checked(config: RunConfig, recorded: dict[str, Any] | None = None) -> InitialWeights | None:
    """Returns the initial weights of a run after all checks; None if the run starts from the model's own weights.

    ``recorded`` is the content of the run's ``initial.json`` from an earlier launch.

    Raises:
        ConfigError: If the weights do not exist, do not fit the run, or are not the recorded ones.
        RunError: If the checkpoint is damaged.
    """
    if config.training.init_from is None:
        return None
    initial = InitialWeights.named(config.training.init_from)
    initial.check(config)
    if recorded is not None and recorded != initial.to_json():
        raise ConfigError(
            f"training.init_from = {str(initial)!r} is not the checkpoint that this run started from; "
            "restore it, or start a new run"
        )
    return initial


def _with_reference(config: RunConfig, reference: str) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update={"init_from": reference})})


def _split(reference: str) -> tuple[Path, int | None]:
    found = _REFERENCE.fullmatch(reference)
    assert found is not None  # any text that is not empty matches
    return Path(found["run"]), None if found["step"] is None else int(found["step"])
