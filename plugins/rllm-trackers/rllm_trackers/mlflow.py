"""MLflow: a database next to the run folder, or a server."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rllm_core.config import RunConfig, Section
from rllm_core.tracker import Cell, Status, Tracker
from rllm_trackers.credentials import check_credential
from rllm_trackers.identity import identity
from rllm_trackers.library import library
from rllm_trackers.tables import flat

STATUSES: dict[Status, str] = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
DATABASE = "mlflow.db"
# Limits of MLflow.
MAX_NAME_CHARACTERS = 250
MAX_PARAM_CHARACTERS = 6000
PARAMS_PER_CALL = 100
SHOWN_TABLES = "mlflow.loggedArtifacts"
NOT_IN_NAMES = re.compile(r"[^\w./ -]")
NOT_IN_PATHS = re.compile(r"^/|/$|(?<=/)/|^\.\.|(?<![^/])\.\.?(?![^/])")  # as paths, such names would mean others


class MlflowConfig(Section):
    """``[mlflow]``: MLflow tracker. Server credentials come from ``MLFLOW_TRACKING_USERNAME`` and its siblings."""

    tracking_uri: Annotated[
        str, Field(description="Server or database. Defaults to the database mlflow.db next to the run folder.")
    ] = ""
    experiment: Annotated[str, Field(min_length=1, description="Experiment; created if missing.")] = "rllm"
    run_name: Annotated[str, Field(description="Display name. Defaults to the name of the run folder.")] = ""
    tags: Annotated[dict[str, str], Field(description="Run tags.")] = Field(default_factory=dict)


class MlflowTracker(Tracker):
    """Logs metrics by step, and the run file as parameters. A repeated step has two values; the later one counts."""

    name: ClassVar[str] = "mlflow"
    config: MlflowConfig

    def __init__(self, config: MlflowConfig) -> None:
        super().__init__(config)
        # MLflow reads this at import time; without it, it sends usage data to its developers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._tracking: Any = library("mlflow.tracking", tracker=self.name)
        self._entities: Any = library("mlflow.entities", tracker=self.name)
        if config.tracking_uri:
            check_credential("MLFLOW_TRACKING_TOKEN")
        else:
            for module in ("sqlalchemy", "alembic"):
                library(module, tracker=self.name)

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`."""
        folder = Path(run_dir).resolve()
        database = folder.parent / DATABASE
        if not self.config.tracking_uri and not database.exists():
            self._create(database)
        self._client = self._tracking.MlflowClient(self.config.tracking_uri or f"sqlite:///{database}")
        self._run_id, is_resumed = identity(run_dir, self.name, lambda: self._new_run(folder, config))
        if is_resumed:
            self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        now_milliseconds = int(time.time() * 1000)
        logged = [
            self._entities.Metric(valid_name(name), value, now_milliseconds, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=logged)

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """See `Tracker.log_table`; a file in the format of MLflow's own ``log_table``, which needs pandas."""
        file = f"{name}/step-{step:06}.json"
        self._client.log_dict(self._run_id, {"columns": list(columns), "data": [list(row) for row in rows]}, file)
        # MLflow shows only the last table in its table view.
        self._client.set_tag(self._run_id, SHOWN_TABLES, json.dumps([{"path": file, "type": "table"}]))

    def finish(self, status: Status) -> None:
        """See `Tracker.finish`."""
        self._client.set_terminated(self._run_id, STATUSES[status])

    def _create(self, database: Path) -> None:
        """Creates a database elsewhere and moves it into place, where two runs may start at the same time.

        MLflow takes seconds to create its tables, and cannot open a database whose creation was killed: every later
        run in this folder would lose its metrics.
        """
        with tempfile.TemporaryDirectory(prefix=f".{DATABASE}-", dir=database.parent) as folder:
            made = Path(folder) / DATABASE
            self._tracking.MlflowClient(f"sqlite:///{made}").search_experiments()
            try:
                os.link(made, database)
            except OSError:  # another run was faster, or the file system has no links
                if not database.exists():
                    made.rename(database)

    def _new_run(self, folder: Path, config: RunConfig) -> str:
        """Creates the run and logs its parameters, only once: MLflow parameters cannot change.

        The few keys that may differ on resume do not affect earlier steps.
        """
        experiment = self._client.get_experiment_by_name(self.config.experiment)
        # By default, MLflow would put a database's files into the working directory.
        files = None if self.config.tracking_uri else (folder.parent / "mlartifacts").as_uri()
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(self.config.experiment, artifact_location=files)
        )
        name = self.config.run_name or folder.name
        run = self._client.create_run(experiment_id, run_name=name, tags=self.config.tags)
        run_id: str = run.info.run_id
        params = [
            self._entities.Param(valid_name(key), str(value)[:MAX_PARAM_CHARACTERS])
            for key, value in flat(config.to_tables()).items()
        ]
        for first in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[first : first + PARAMS_PER_CALL])
        return run_id


def valid_name(name: str) -> str:
    """Returns a name of a metric or parameter that MLflow accepts, with everything else replaced by ``_``."""
    return NOT_IN_PATHS.sub("_", NOT_IN_NAMES.sub("_", name)[:MAX_NAME_CHARACTERS])
