"""A real library that fails or hangs: training goes on, and the summary says so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import readers
from rllm_trackers.mlflow import MlflowConfig, MlflowTracker

from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.run_folder.tracking import Trackers
from rllm_core.runs import launch


@pytest.mark.parametrize("tracker", ["tensorboard"])
def test_a_store_that_refuses_ends_the_tracker_and_not_the_run(tracker: str, train: Callable[..., Any]) -> None:
    run = train(tracker, "trackio", overrides=("tensorboard.folder=/proc/nowhere",))
    assert run.error is None
    assert run.summary["status"] == "completed"
    assert list(run.summary["tracker_failures"]) == ["tensorboard"]
    assert "/proc/nowhere" in run.summary["tracker_failures"]["tensorboard"]
    assert len(readers.read_trackio(run.path)["reward_mean"]) == 4, "the other one has everything"


@pytest.mark.parametrize("tracker", ["mlflow"])
def test_a_server_that_does_not_answer_is_given_up(
    tracker: str, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that accepts connections and never responds. MLflow itself goes on trying for minutes."""
    monkeypatch.setattr(launch, "Trackers", lambda trackers, note: Trackers(trackers, note=note, deadline_seconds=1.0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run = train(tracker, overrides=(f"mlflow.tracking_uri=http://127.0.0.1:{silent.getsockname()[1]}",))
    assert run.error is None
    assert run.summary["optimizer_steps"] == 4
    assert " 1 s" in run.summary["tracker_failures"]["mlflow"]


@pytest.mark.parametrize(
    ("tracker", "override", "says"),
    [
        ("wandb", "wandb.mode=online", "set WANDB_API_KEY, or run: wandb login"),
        ("swanlab", "swanlab.mode=online", "set SWANLAB_API_KEY, or run: swanlab login"),
    ],
)
def test_a_service_without_a_key_is_an_error_at_the_start(
    tracker: str, override: str, says: str, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # or a thread reports the missing key to W&B a minute later
    with pytest.raises(ConfigError, match=says):
        train(tracker, overrides=(override,))


@pytest.mark.parametrize(
    ("tracker", "key", "variable"),
    [("mlflow", "tracking_uri", "MLFLOW_TRACKING_TOKEN"), ("trackio", "server_url", "TRACKIO_WRITE_TOKEN")],
)
def test_a_credential_that_the_library_would_quote_is_an_error_at_the_start(
    tracker: str, key: str, variable: str, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a mounted file: no header can have its line end, and the library's error has the whole header."""
    monkeypatch.setenv(variable, "secret\n")
    with pytest.raises(ConfigError, match=variable) as error:
        train(tracker, overrides=(f"{tracker}.{key}=http://127.0.0.1:1",))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("tracker", ["trackio"])
def test_an_environment_that_would_send_metrics_away_is_an_error_unless_the_run_file_says_so(
    tracker: str, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/board")
    with pytest.raises(ConfigError, match="TRACKIO_SPACE_ID is set"):
        train(tracker)
    monkeypatch.delenv("TRACKIO_SPACE_ID")
    with pytest.raises(ConfigError, match="cannot both be set"):
        train(tracker, overrides=("trackio.space_id=a/b", "trackio.server_url=http://localhost:1"))


OFFLINE = """
import sys

reached = []

def watch(event, arguments):
    if event == "socket.getaddrinfo" and arguments[0] not in ("127.0.0.1", "::1", "localhost"):
        reached.append(arguments[0])

sys.addaudithook(watch)

from rllm_trackers.wandb import WandbConfig, WandbTracker

WandbTracker(WandbConfig())

import wandb
from wandb.analytics.opentelemetry.opentelemetry_proxy import get_open_telemetry_proxy

run = wandb.init(dir=sys.argv[1], mode="offline", settings=wandb.Settings(console="off"))
run.log({"reward": 1.0})
run.finish()
waiting = get_open_telemetry_proxy()
if waiting is not None:
    waiting.shutdown(3000)  # sends what would otherwise be sent every minute
print(reached)
"""


def test_wandb_reports_nothing_about_an_offline_run(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_ERROR_REPORTING"}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


KILLED = """
import os
import sys

import rllm_trackers
import sqlalchemy
from rllm_trackers.mlflow import MlflowConfig, MlflowTracker

from rllm_core.config import RunConfig


@sqlalchemy.event.listens_for(sqlalchemy.engine.Engine, "before_cursor_execute")
def in_a_migration(connection, cursor, statement, *others):
    if "_alembic_tmp_" in statement:
        os._exit(9)


MlflowTracker(MlflowConfig()).start(RunConfig(workflow="sort", backend="local"), sys.argv[1])
"""


def test_a_kill_while_mlflow_creates_its_database_costs_later_runs_nothing(tmp_path: Path) -> None:
    killed, later = tmp_path / "killed", tmp_path / "later"
    for run in (killed, later):
        run.mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, str(killed)], check=False, capture_output=True).returncode == 9
    for run in (later, killed):
        tracker = MlflowTracker(MlflowConfig())
        tracker.start(RunConfig(workflow="sort", backend="local"), str(run))
        tracker.log(1, {"reward_mean": 0.5})
        tracker.finish("completed")
        assert readers.read_mlflow(run) == {"reward_mean": [(1, 0.5)]}
