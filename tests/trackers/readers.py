"""Readers of recorded runs, through the libraries themselves as far as possible."""

from __future__ import annotations

import html
import json
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]

WRITTEN_SECONDS = 120.0


def kept_id(run_dir: Path, tracker: str) -> str:
    found: str = json.loads((run_dir / "trackers" / f"{tracker}.json").read_text())["id"]
    return found


def read_tensorboard(run_dir: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # All values, not a sample of them.
    events = EventAccumulator(str(run_dir / "trackers" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb_records(run_dir: Path) -> list[Any]:
    """Records of a run's offline files, in launch order.

    W&B's own reader is not in its Python package. The files are logs in LevelDB's format after a header of 7 bytes;
    their records are protocol buffers of the package. ``Run.finish`` returns before W&B's process has written the end
    of the file, so this waits for the exit record of each.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + WRITTEN_SECONDS
    while True:
        paths = sorted((run_dir / "trackers" / "wandb").glob("offline-run-*/*.wandb"))
        records = [Record.FromString(data) for path in paths for data in _leveldb_records(path.read_bytes())]
        ended = sum(record.WhichOneof("record_type") == "exit" for record in records)
        if 0 < len(paths) <= ended or time.monotonic() > deadline:
            return records
        time.sleep(0.02)


def _leveldb_records(content: bytes) -> Iterator[bytes]:
    block, header, position, parts = 32768, 7, 7, b""
    while position + header <= len(content):
        if block - position % block < header:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if kind == 0 or position + header + length > len(content):
            return  # reserved but never written, or not written to its end
        parts += content[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(run_dir: Path) -> Points:
    points: Points = defaultdict(list)
    for record in wandb_records(run_dir):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    points[name].append((row["step"], value))
    return points


def mlflow_client(run_dir: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}")


def read_mlflow(run_dir: Path) -> Points:
    client, run_id = mlflow_client(run_dir), kept_id(run_dir, "mlflow")
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        for name in client.get_run(run_id).data.metrics
    }


def read_trackio(run_dir: Path, project: str = "rllm") -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    points: Points = defaultdict(list)
    for row in SQLiteStorage.get_logs(project, kept_id(run_dir, "trackio")):
        for name, value in row.items():
            if name not in ("step", "timestamp", "status"):
                points[name].append((row["step"], value))
    return points


def swanlab_records(run_dir: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    records = []
    for path in sorted((run_dir / "trackers" / "swanlab").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(str(path))
        records += [Record.FromString(data) for data in reader]
        reader.close()
    return records


def read_swanlab(run_dir: Path) -> Points:
    points: Points = defaultdict(list)
    for record in swanlab_records(run_dir):
        if record.HasField("scalar"):
            points[record.scalar.key].append((record.scalar.step, record.scalar.value.number))
    return points


READERS = {
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


# --------------------------------------------------------------------------------------------------------------------
# Tables: the rows of each table "answers" by step


Tables = dict[int, list[dict[str, Any]]]


def tables_of_tensorboard(run_dir: Path) -> Tables:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "trackers" / "tensorboard"))
    events.Reload()
    found: Tables = {}
    for event in events.Tensors("answers"):
        head, _, *lines = [
            [html.unescape(cell.strip()) for cell in line[1:-1].split("|")]
            for line in event.tensor_proto.string_val[0].decode().splitlines()
        ]
        found[event.step] = [dict(zip(head, line, strict=True)) for line in lines]
    return found


def tables_of_wandb(run_dir: Path) -> Tables:
    found: Tables = {}
    for record in wandb_records(run_dir):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            path = row.get("answers/path") or row.get("answers", {}).get("path")
            if path is not None:
                [file] = (run_dir / "trackers" / "wandb").glob(f"offline-run-*/files/{path}")
                table = json.loads(file.read_text())
                found[row["step"]] = [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]
    return found


def tables_of_mlflow(run_dir: Path) -> Tables:
    client, run_id = mlflow_client(run_dir), kept_id(run_dir, "mlflow")
    found: Tables = {}
    for file in client.list_artifacts(run_id, "answers"):
        table = json.loads(Path(client.download_artifacts(run_id, file.path)).read_text())
        found[int(Path(file.path).stem.rpartition("-")[2])] = [
            dict(zip(table["columns"], line, strict=True)) for line in table["data"]
        ]
    return found


def tables_of_trackio(run_dir: Path) -> Tables:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("rllm", kept_id(run_dir, "trackio"))
    return {row["step"]: row["answers"]["_value"] for row in logs if "answers" in row}


def tables_of_swanlab(run_dir: Path) -> Tables:
    found: Tables = {}
    for record in swanlab_records(run_dir):
        if record.HasField("media") and record.media.key == "answers":
            [item] = record.media.value.items
            [path] = (run_dir / "trackers" / "swanlab").glob(f"run-*/media/echarts/{item.filename}")
            found[record.media.step] = json.loads(path.read_text())["rowData"]
    return found


TABLES = {
    "mlflow": tables_of_mlflow,
    "swanlab": tables_of_swanlab,
    "tensorboard": tables_of_tensorboard,
    "trackio": tables_of_trackio,
    "wandb": tables_of_wandb,
}
