"""Trackio: a local database in Trackio's own folder, a server, or a Hugging Face Space."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rllm_core.config import RunConfig, Section
from rllm_core.errors import ConfigError
from rllm_core.tracker import Cell, Status, Tracker
from rllm_trackers.credentials import check_credential
from rllm_trackers.identity import identity
from rllm_trackers.library import library

ELSEWHERE = {"space_id": "TRACKIO_SPACE_ID", "server_url": "TRACKIO_SERVER_URL"}


class TrackioConfig(Section):
    """``[trackio]``: Trackio tracker. Tokens come from ``HF_TOKEN`` and ``TRACKIO_WRITE_TOKEN``."""

    project: Annotated[str, Field(min_length=1, description="Project.")] = "rllm"
    run_name: Annotated[
        str, Field(description="Run name; a random suffix makes it unique. Defaults to the name of the run folder.")
    ] = ""
    group: Annotated[str, Field(description="Run group.")] = ""
    space_id: Annotated[str, Field(description="Hugging Face Space to send metrics to. Defaults to none.")] = ""
    server_url: Annotated[str, Field(description="Trackio server to send metrics to. Defaults to none.")] = ""


class TrackioTracker(Tracker):
    """Logs metrics by step. A repeated step has two values. The last entry, ``status``, states how the run ended."""

    name: ClassVar[str] = "trackio"
    config: TrackioConfig

    def __init__(self, config: TrackioConfig) -> None:
        super().__init__(config)
        if config.space_id and config.server_url:
            raise ConfigError("trackio.space_id and trackio.server_url cannot both be set")
        for key, variable in ELSEWHERE.items():
            if os.environ.get(variable) and not (config.space_id or config.server_url):
                raise ConfigError(
                    f"{variable} is set, so metrics would leave this machine although the run file does not ask for "
                    f"it; set trackio.{key}, or unset {variable}"
                )
        check_credential("TRACKIO_WRITE_TOKEN")
        self._trackio: Any = library("trackio", tracker=self.name)

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`."""
        wanted = self.config.run_name or Path(run_dir).resolve().name
        # Trackio identifies runs by name.
        name, is_resumed = identity(run_dir, self.name, lambda: f"{wanted}-{secrets.token_hex(4)}")
        self._run = self._trackio.init(
            project=self.config.project,
            name=name,
            group=self.config.group or None,
            space_id=self.config.space_id or None,
            server_url=self.config.server_url or None,
            config=config.to_tables(),
            resume="allow" if is_resumed else "never",
            embed=False,
        )
        self._last_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)
        self._last_step = step

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """See `Tracker.log_table`."""
        table = self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self, status: Status) -> None:
        """See `Tracker.finish`."""
        self._run.log({"status": status}, step=self._last_step)
        self._run.finish()
