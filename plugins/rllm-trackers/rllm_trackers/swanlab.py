"""SwanLab: offline in the run folder, or the SwanLab cloud."""

from __future__ import annotations

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

STATES: dict[Status, str] = {"completed": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanlabConfig(Section):
    """``[swanlab]``: SwanLab tracker. The API key is ``SWANLAB_API_KEY``, or the one that ``swanlab login`` stored."""

    mode: Annotated[
        Literal["offline", "online"],
        Field(description="Keep everything in the run folder for swanlab sync (offline), or send it to the cloud."),
    ] = "offline"
    project: Annotated[str, Field(min_length=1, description="Project.")] = "rllm"
    workspace: Annotated[str, Field(description="Workspace. Defaults to that of the API key.")] = ""
    run_name: Annotated[str, Field(description="Display name. Defaults to the name of the run folder.")] = ""
    group: Annotated[str, Field(description="Run group.")] = ""
    tags: Annotated[tuple[str, ...], Field(description="Run tags.")] = ()


class SwanlabTracker(Tracker):
    """Logs metrics by step. SwanLab allows one run per process at a time and rejects a second one."""

    name: ClassVar[str] = "swanlab"
    config: SwanlabConfig

    def __init__(self, config: SwanlabConfig) -> None:
        super().__init__(config)
        self._swanlab: Any = library("swanlab", tracker=self.name)
        if config.mode == "online" and not self._swanlab.Settings().api_key:
            raise ConfigError('swanlab.mode = "online" needs an API key: set SWANLAB_API_KEY, or run: swanlab login')

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`."""
        run_id, _ = identity(run_dir, self.name, lambda: secrets.token_hex(8))
        if self._swanlab.has_run() and self._swanlab.get_run().id == run_id:
            self._swanlab.get_run().finish(state="aborted")  # left open when this folder's tracker was switched off
        folder = files_of(run_dir) / self.name
        folder.mkdir(exist_ok=True)
        self._run = self._swanlab.init(
            log_dir=str(folder),
            mode=self.config.mode,
            id=run_id,
            resume="allow" if self.config.mode == "online" else None,
            project=self.config.project,
            workspace=self.config.workspace or None,
            name=self.config.run_name or Path(run_dir).resolve().name,
            group=self.config.group or None,
            tags=list(self.config.tags) or None,
            config=config.to_tables(),
            settings=self._swanlab.Settings(
                interactive=False, terminal=self._swanlab.Settings.Terminal(proxy_type="none")
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """See `Tracker.log_table`."""
        table = self._swanlab.echarts.Table()
        table.add(list(columns), [["" if cell is None else cell for cell in row] for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self, status: Status) -> None:
        """See `Tracker.finish`."""
        error = "the run failed" if status == "failed" else None
        self._run.finish(state=STATES[status], error=error)
