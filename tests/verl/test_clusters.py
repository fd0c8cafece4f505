"""The scripts for SLURM and for Ray jobs, with real Ray and a real run; only SLURM's own commands are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hold import HELD, Hold, eventually
from ray.cluster_utils import Cluster

from rllm_viewer.verify import verify

EXAMPLES = Path(__file__).parents[2] / "plugins" / "rllm-verl" / "examples"
STEPS = 3
RUN_FILE = f"""
workflow = "{HELD}"
backend = "local"

[rollout]
host = "ray"
workers = 2

[ray]
address = "auto"

[training]
steps = {STEPS}
groups_per_step = 4
rollouts_per_group = 4
validation_rollouts = 4
"""
# Starts the command on the other machine of the job, which is this one.
SRUN = """#!/bin/bash
while [ "$1" != ray ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$CALLS"
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; fi
"""


def summary(folder: Path) -> dict[str, Any]:
    """The summary of a run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def write_run_file(folder: Path, hold: Hold) -> Path:
    """Writes the run file of a held run."""
    settings = [f"{key.partition('.')[2]} = {json.dumps(value)}" for key, value in hold.settings.items()]
    path = folder / "run.toml"
    path.write_text(RUN_FILE + "\n[held]\n" + "\n".join(settings) + "\n", encoding="utf-8")
    return path


def path_with(*folders: Path) -> str:
    """``PATH`` with the commands of this environment, and of other folders before them."""
    return os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a SLURM job on two machines, which are both this one."""
    commands = tmp_path / "slurm"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o700)
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "machine[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "4",
        "CALLS": str(tmp_path / "calls"),
        # `cpu_environment` keeps Ray to the loopback interface with a variable that forbids a second machine. The
        # script's Ray lets nobody in without its token.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }
    yield os.environ | job | {"PATH": path_with(commands)}
    shutil.rmtree(f"/tmp/ray-{job['SLURM_JOB_ID']}")


def test_a_slurm_job_that_runs_out_of_time_queues_itself_again(slurm: dict[str, str], tmp_path: Path) -> None:
    folder, calls = tmp_path / "run", tmp_path / "calls"
    hold = Hold(tmp_path / "hold", folder)
    command = ["bash", str(EXAMPLES / "slurm.sh"), str(write_run_file(tmp_path, hold)), str(folder)]

    first = subprocess.Popen(command, env=slurm)
    hold.wait_for(1, process=first)
    everything = psutil.Process(first.pid).children(recursive=True)
    first.terminate()  # as --signal=B:TERM does: to the script alone
    assert first.wait() == 143
    assert summary(folder)["status"] == "interrupted"
    assert calls.read_text().splitlines()[-1] == f"requeue {slurm['SLURM_JOB_ID']}"
    eventually(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in everything))

    hold.allow(10**6)
    assert subprocess.run(command, env=slurm, check=False).returncode == 0
    assert summary(folder)["status"] == "completed"
    assert summary(folder)["rollout_host"]["where"] == "2 Ray workers on 2 nodes"
    assert [call.split()[0] for call in calls.read_text().splitlines()] == ["show", "requeue", "show"]
    assert verify(folder).problems == []


def test_a_slurm_job_of_an_invalid_run_file_ends_with_its_message(slurm: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('workflow = "sort"\nbackend = "nowhere"\n', encoding="utf-8")
    command = ["bash", str(EXAMPLES / "slurm.sh"), str(wrong), str(tmp_path / "run")]
    done = subprocess.run(
        command, env=slurm | {"SLURM_JOB_NUM_NODES": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_a_ray_job_can_be_stopped_and_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "600")
    monkeypatch.setenv("PATH", path_with())
    folder = tmp_path / "run"
    hold = Hold(tmp_path / "hold", folder)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": True})
    try:
        head, _, port = cluster.webui_url.rpartition(":")
        script = (EXAMPLES / "ray-job.sh").read_text(encoding="utf-8").replace("8265", port)
        command = ["bash", "-c", script, "ray-job.sh", head, str(write_run_file(tmp_path, hold)), str(folder)]
        sent = subprocess.run(command, capture_output=True, text=True, check=True)
        [stop] = [line for line in sent.stdout.splitlines() if line.startswith("stop:")]
        hold.wait_for(1)
        subprocess.run(stop.partition(":")[2].split(), check=True)
        assert summary(folder)["status"] == "interrupted"
        hold.allow(10**6)
        subprocess.run(command, check=True)
        eventually(lambda: (folder / "summary.json").is_file() and summary(folder)["status"] == "completed")
    finally:
        cluster.shutdown()
    assert verify(folder).problems == []
