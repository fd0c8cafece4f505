"""Weights & Biases: offline in the run folder, or the W&B service."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rllm_core.config import RunConfig, Section
from rllm_core.errors import ConfigError
from rllm_core.tracker import Cell, Status, Tracker
from rllm_trackers.identity import files_of, identity
from rllm_trackers.library import library

INIT_TIMEOUT_SECONDS = 45.0
# W&B shows these as finished, killed and failed.
EXIT_CODES: dict[Status, int] = {"completed": 0, "interrupted": 255, "failed": 1}


class WandbConfig(Section):
    """``[wandb]``: W&B tracker. The API key is ``WANDB_API_KEY``, or the one that ``wandb login`` stored."""

    mode: Annotated[
        Literal["offline", "online"],
        Field(description="Keep everything in the run folder for wandb sync (offline), or send it to W&B (online)."),
    ] = "offline"
    project: Annotated[str, Field(min_length=1, description="Project.")] = "rllm"
    entity: Annotated[str, Field(description="User or team. Defaults to that of the API key.")] = ""
    run_name: Annotated[str, Field(description="Display name. Defaults to the name of the run folder.")] = ""
    group: Annotated[str, Field(description="Run group.")] = ""
    tags: Annotated[tuple[str, ...], Field(description="Run tags.")] = ()


class WandbTracker(Tracker):
    """Logs against its own axis, ``step``: W&B's built-in step only increases, and a resumed run repeats steps."""

    name: ClassVar[str] = "wandb"
    config: WandbConfig
    _left_behind: ClassVar[dict[str, Any]] = {}  # unfinished runs of this process, by id

    def __init__(self, config: WandbConfig) -> None:
        super().__init__(config)
        if config.mode == "offline":  # wandb reports its own errors and timings to W&B even then
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb: Any = library("wandb", tracker=self.name)
        if config.mode == "online" and not self._wandb.login(prompt=False):
            raise ConfigError('wandb.mode = "online" needs an API key: set WANDB_API_KEY, or run: wandb login')

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`."""
        run_id, _ = identity(run_dir, self.name, lambda: secrets.token_hex(8))
        if run_id in self._left_behind:  # left open when this folder's tracker was switched off
            self._left_behind.pop(run_id).finish(exit_code=EXIT_CODES["interrupted"])
        self._run = self._left_behind[run_id] = self._wandb.init(
            dir=str(files_of(run_dir)),
            mode=self.config.mode,
            id=run_id,
            resume="allow",
            reinit="create_new",
            project=self.config.project,
            entity=self.config.entity or None,
            name=self.config.run_name or Path(run_dir).resolve().name,
            group=self.config.group or None,
            tags=self.config.tags,
            config=config.to_tables(),
            allow_val_change=True,
            # Do not capture the console: that conflicts with the live view in the terminal.
            settings=self._wandb.Settings(console="off", init_timeout=INIT_TIMEOUT_SECONDS),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log({**metrics, "step": step})

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """See `Tracker.log_table`."""
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({name: table, "step": step})

    def finish(self, status: Status) -> None:
        """See `Tracker.finish`."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=EXIT_CODES[status])
        del self._left_behind[self._run.id]
