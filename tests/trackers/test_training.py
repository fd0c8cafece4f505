"""A short real training run with each tracker, failed and resumed; its records are read back from the store."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import readers
from readers import READERS, Points

# A step that was logged twice has both values, unless the library discards the first.
REPEATED = {"tensorboard": [1, 2, 3, 4]}


def logged(run: Any) -> Points:
    """Expected metrics, from the lines of a run, in the readers' format."""
    points: Points = {}
    for row in [*run.lines("metrics"), *run.lines("timings")]:
        for name, value in row.items():
            if value is not None and name != "step":
                points.setdefault(name, []).append((row["step"], value))
    for validation in run.summary["validation"]:
        own = {f"workflow/{name}": value for name, value in validation.pop("metrics").items()}
        for name, value in {**validation, **own}.items():
            if value is not None:
                points.setdefault(f"validation/{name}", []).append((validation["step"], value))
    return points


def assert_recorded_last(recorded: Points, expected: Points) -> None:
    for name, points in expected.items():
        last = dict(recorded[name])
        for step, value in points:
            assert math.isclose(last[step], value, rel_tol=1e-6), f"{name} of step {step}"


@pytest.mark.parametrize("tracker", READERS)
def test_a_training_and_its_resume_are_one_run(tracker: str, train: Callable[..., Any]) -> None:
    """The run fails in step 4, after a checkpoint at step 2 and the metrics of step 3."""
    read = READERS[tracker]
    first = train(tracker, fails_at=4)
    assert first.error is not None
    assert first.summary["tracker_failures"] == {}
    before = read(first.path)
    assert [step for step, _ in before["reward_mean"]] == [1, 2, 3]
    assert [step for step, _ in before["validation/reward_mean"]] == [0, 2]

    resumed = train(tracker, resume=True)
    assert resumed.error is None
    assert resumed.summary["tracker_failures"] == {}
    recorded = read(resumed.path)
    assert [step for step, _ in recorded["reward_mean"]] == REPEATED.get(tracker, [1, 2, 3, 3, 4])
    assert [step for step, _ in recorded["validation/reward_mean"]] == [0, 2, 4]
    assert_recorded_last(recorded, logged(resumed))


@pytest.mark.parametrize("tracker", READERS)
def test_sampled_answers_are_recorded_as_tables(tracker: str, train: Callable[..., Any]) -> None:
    run = train(tracker, overrides=("training.answers_table_every_steps=2",))
    assert (run.error, run.summary["tracker_failures"]) == (None, {})
    tables = readers.TABLES[tracker](run.path)
    assert sorted(tables) == [2, 4]
    for step, rows in tables.items():
        [group] = [line for line in run.lines("groups_index") if (line["step"], line["outcome"]) == (step, "trained")]
        assert [row["task"] for row in rows] == [group["task"]] * 4
        assert [float(row["reward"]) for row in rows] == group["rewards"]
        assert all(row["question"] and row["answer"] for row in rows)


@pytest.mark.parametrize("tracker", READERS)
def test_the_run_file_its_name_and_its_end_are_recorded(tracker: str, train: Callable[..., Any]) -> None:
    train(tracker, fails_at=4, overrides=NAMED.get(tracker, ()))
    found = ABOUT[tracker](train(tracker, resume=True, overrides=NAMED.get(tracker, ())).path)
    assert found["groups_per_step"] == 2
    assert found["name"] == NAME[tracker]
    assert found["ends"] == ENDS[tracker]


NAMED = {
    "mlflow": ("mlflow.run_name=first", 'mlflow.tags={team="rl"}', "mlflow.experiment=words"),
    "swanlab": ("swanlab.run_name=first", 'swanlab.tags=["rl"]'),
    "trackio": ("trackio.run_name=first", "trackio.group=rl"),
    "wandb": ("wandb.run_name=first", 'wandb.tags=["rl"]', "wandb.project=words"),
}
NAME: dict[str, Any] = {
    "mlflow": ("words", "first", "rl"),
    "swanlab": {("rllm", "first", ("rl",))},
    "tensorboard": True,
    "trackio": ("first", "rl"),
    "wandb": {("words", "first", ("rl",))},
}
ENDS: dict[str, Any] = {
    "mlflow": "FINISHED",
    "swanlab": ["RUN_STATE_CRASHED", "RUN_STATE_FINISHED"],
    "tensorboard": ["completed"],
    "trackio": ["failed", "completed"],
    "wandb": [1, 0],
}


def about_mlflow(run_dir: Path) -> dict[str, Any]:
    client = readers.mlflow_client(run_dir)
    run = client.get_run(readers.kept_id(run_dir, "mlflow"))
    experiment = client.get_experiment(run.info.experiment_id)
    assert len(client.search_runs([run.info.experiment_id])) == 1
    return {
        "groups_per_step": int(run.data.params["training.groups_per_step"]),
        "name": (experiment.name, run.info.run_name, run.data.tags["team"]),
        "ends": run.info.status,
    }


def about_swanlab(run_dir: Path) -> dict[str, Any]:
    import yaml
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

    records = readers.swanlab_records(run_dir)
    starts = [record.start for record in records if record.HasField("start")]
    [config, _] = sorted((run_dir / "trackers" / "swanlab").glob("run-*/files/config.yaml"))
    assert {start.id for start in starts} == {readers.kept_id(run_dir, "swanlab")}
    return {
        "groups_per_step": yaml.safe_load(config.read_text())["training"]["value"]["groups_per_step"],
        "name": {(start.project, start.name, tuple(start.tags)) for start in starts},
        "ends": [RunState.Name(record.finish.state) for record in records if record.HasField("finish")],
    }


def about_tensorboard(run_dir: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    events = EventAccumulator(str(run_dir / "trackers" / "tensorboard"))  # the values that TensorBoard shows
    events.Reload()
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    statuses = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("status")]
    return {
        "groups_per_step": started.hparams["training.groups_per_step"].number_value,
        "name": started.group_name != "",
        "ends": statuses,
    }


def about_trackio(run_dir: Path) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    name = readers.kept_id(run_dir, "trackio")
    assert len([run for run in SQLiteStorage.get_runs("rllm") if run == name]) == 1
    config = SQLiteStorage.get_run_config("rllm", name)
    logs = SQLiteStorage.get_logs("rllm", name)
    return {
        "groups_per_step": config["training"]["groups_per_step"],
        "name": (name.rpartition("-")[0], config["_Group"]),
        "ends": [row["status"] for row in logs if "status" in row],
    }


def about_wandb(run_dir: Path) -> dict[str, Any]:
    import json

    records = readers.wandb_records(run_dir)
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    [groups] = {
        json.loads(item.value_json)["groups_per_step"]
        for run in runs
        for item in run.config.update
        if item.key == "training"
    }
    assert {run.run_id for run in runs} == {readers.kept_id(run_dir, "wandb")}
    return {
        "groups_per_step": groups,
        "name": {(run.project, run.display_name, tuple(run.tags)) for run in runs},
        "ends": [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"],
    }


ABOUT: dict[str, Callable[[Path], dict[str, Any]]] = {
    "mlflow": about_mlflow,
    "swanlab": about_swanlab,
    "tensorboard": about_tensorboard,
    "trackio": about_trackio,
    "wandb": about_wandb,
}


@pytest.mark.parametrize("tracker", ["mlflow"])
@pytest.mark.parametrize("kind", ["größe & gewicht", "a//b"])
def test_a_name_in_the_run_file_that_mlflow_rejects_is_changed(
    tracker: str, kind: str, train: Callable[..., Any]
) -> None:
    run = train(tracker, overrides=(f'costs.prices."{kind}".hour=1.0',))
    assert run.summary["tracker_failures"] == {}
