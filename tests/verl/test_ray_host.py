"""Tests of rollout host ``ray`` on one machine that looks like two nodes, with real Ray and backend ``local``."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosted
import psutil
import pytest
import ray
import rllm_ray.host
from hold import HELD, Hold, MustEnd, eventually, is_running
from hosted import Played, play
from ray.cluster_utils import Cluster
from rllm_ray.config import RayConfig
from rllm_ray.host import RayHost
from verl_runs import RAYS_OWN, command_line

import rllm_core
from rllm_core.errors import ConfigError, RunError
from rllm_core.training import requests
from rllm_core.types import Task
from rllm_viewer.verify import verify

SMALL: dict[str, Any] = {
    "training": {"steps": 2, "groups_per_step": 4, "rollouts_per_group": 4, "validation_rollouts": 16},
    "training.checkpoint_every_steps": 1,
    "rollout.max_attempts": 20,
}
RAY = {"rollout.host": "ray", "rollout.workers": 2}
MCP = {
    "calculator.servers": {
        name: {"command": [sys.executable, "-m", "rllm_workflows.mcp_example_server", name]}
        for name in ("sums", "products")
    }
}
GATED = Path(__file__).parent / "support" / "gated.py"


@dataclass
class Nodes:
    """A cluster of a head, which has no room for workers, and two nodes."""

    cluster: Cluster
    nodes: list[Any] = field(default_factory=list)

    def add(self) -> None:
        """Adds a node."""
        self.nodes.append(self.cluster.add_node(num_cpus=8, include_dashboard=False))

    def lose(self) -> None:
        """Kills a node."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Cluster that this process has joined."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    found = Nodes(cluster)
    found.add()
    found.add()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield found
    ray.shutdown()
    cluster.shutdown()


def played(workflow: str, tasks: list[Any], **options: Any) -> Played:
    """Plays in the cluster of this process."""
    settings = RayConfig(**options.pop("ray", {}))
    return play(workflow, tasks, host=functools.partial(RayHost, section=settings), **options)  # type: ignore[arg-type]


def train(folder: Path, workflow: str, **settings: Any) -> Path:
    """Trains the starter model, and returns the folder."""
    return rllm_core.train(workflow, SMALL | settings, run_dir=folder, backend="local").path


def summary(folder: Path) -> dict[str, Any]:
    """The summary of a run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def metrics(folder: Path) -> bytes:
    """Lines of all steps."""
    return (folder / "metrics.jsonl").read_bytes()


def lost(folder: Path) -> int:
    """Number of rollouts so far that were lost with their worker."""
    return (folder / "events.jsonl").read_text().count('"worker_lost"')


@pytest.mark.parametrize(
    ("workflow", "settings"),
    [("sort", {}), pytest.param("calculator", MCP, id="calculator-mcp"), ("solver_judge", {})],
)
def test_nodes_change_no_number(
    nodes: Nodes, workflow: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One turn, servers that the workers start, and two roles; host ``processes`` has all workflows in such workers."""
    # A batch samples without the rollouts whose tools take longer, which changes the last digits.
    monkeypatch.setattr(requests, "LOCKSTEP_OUTSIDE_SECONDS", 120.0)
    inline = train(tmp_path / "inline", workflow, **settings)
    folder = train(tmp_path / "ray", workflow, **settings, **RAY)
    assert metrics(folder) == metrics(inline)
    assert summary(folder)["rollout_host"]["where"] == "2 Ray workers on 2 nodes"
    assert verify(folder).problems == []
    assert ray.is_initialized(), "the run leaves the cluster to whoever joined it"


def test_a_rollout_that_damages_its_worker_costs_only_that(nodes: Nodes, tmp_path: Path) -> None:
    found = played(
        "Fault", ["fine", "kill", "spin", "sleep", "waits", "flood"], workers=6, rollouts_per_worker=1, max_attempts=1,
        rollout_timeout_seconds=8, folder=tmp_path / "workers",
    )  # fmt: skip
    fine, kill, spin, sleep, waits, flood = found.episodes
    assert fine.termination_reason.value == "done"
    assert not fine.metadata["torch"]
    assert kill.termination_reason.value == flood.termination_reason.value == "worker_lost"
    assert "SIGKILL" in (kill.error or "")
    assert "the last words" in (kill.error or "")
    assert "printed more than" in (flood.error or "") or "x" * 100 in (flood.error or "")
    for blocked in (spin, sleep):
        assert blocked.termination_reason.value == "timeout"
        assert "workflows.py:" in (blocked.error or "")
        assert "its worker was killed" in (blocked.error or "")
    assert waits.termination_reason.value == "timeout"
    assert "its worker was killed" not in (waits.error or "")
    assert found.report.restarts == 4
    assert any("the last words" in log.read_text() for log in (tmp_path / "workers").iterdir())


def gated(folder: Path, count: int) -> list[Task]:
    """Tasks that wait for a gate."""
    return [Task(task_id=f"gated-{number}", data={"folder": str(folder)}) for number in range(count)]


async def begun(folder: Path, count: int) -> set[int]:
    """Waits until this many rollouts have begun. Returns the pids of their workers."""
    while len(names := [path.name for path in folder.glob("gated-*")]) < count:
        await asyncio.sleep(0.05)
    return {int(name.split()[1]) for name in names}


@pytest.mark.parametrize("what", ["node", "actor"])
def test_lost_rollouts_are_played_elsewhere(
    nodes: Nodes, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "WORKFLOWS", GATED)
    pids: set[int] = set()

    async def lose(host: Any) -> None:
        pids.update(await begun(tmp_path, 6))
        if what == "node":
            nodes.lose()
        else:
            psutil.Process(host.workers[0].pid).parent().kill()  # type: ignore[union-attr]
        await begun(tmp_path, 7)
        (tmp_path / "gate").touch()

    found = played("Gated", gated(tmp_path, 6), workers=2, during=lose)
    if what == "node":
        nodes.add()
    assert {episode.termination_reason.value for episode in found.episodes} == {"done"}
    lost = [episode for rollout in found.rollouts for episode in rollout.failed]
    assert {episode.termination_reason.value for episode in lost} == {"worker_lost"}
    assert found.report.lost_rollouts == len(lost) == 3
    assert len(pids) == 2
    eventually(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_outlives_its_nodes(nodes: Nodes, kills: int, tmp_path: Path) -> None:
    folder, failed = tmp_path / "run", []
    hold = Hold(tmp_path / "hold", folder)

    def lose() -> None:
        try:
            for kill in range(kills):
                hold.wait_for(1 + 2 * kill)
                before = lost(folder)
                nodes.lose()
                eventually(lambda: lost(folder) > before)  # noqa: B023
                hold.allow(3 + 2 * kill)
        except BaseException as error:
            failed.append(error)
        finally:
            hold.allow(10**6)

    for _ in range(kills - 1):
        nodes.add()
    losing = threading.Thread(target=lose)
    losing.start()
    steps = {"training.steps": 3 + 6 * kills}
    asynchronous = {"training.staleness_threshold": 1, "local.generation": "separated"}
    train(folder, HELD, **steps, **asynchronous, **hold.settings, **(RAY | {"rollout.workers": kills + 1}))
    losing.join()
    nodes.add()
    assert not failed
    found = summary(folder)
    assert found["status"] == "completed"
    assert found["rollout_host"]["restarts"] >= kills
    assert found["retries"] == found["rollout_host"]["lost_rollouts"] > 0
    assert verify(folder).problems == []


PLAYS = """
import functools, sys
from pathlib import Path
sys.path[:0] = [{support!r}]
from hosted import play
from rllm_core.types import Task
from rllm_ray.config import RayConfig
from rllm_ray.host import RayHost
host = functools.partial(RayHost, section=RayConfig(address={address!r}))
tasks = [Task(task_id=f"children-{{n}}", data={{"pids": {pids!r}}}) for n in range(2)]
play("Fault", [*tasks, "spin"], host=host, workers=3, rollouts_per_worker=1, rollout_timeout_seconds=3600)
"""


def test_when_the_driver_dies_all_workers_end(nodes: Nodes, tmp_path: Path) -> None:
    """In a cluster that goes on: also one that blocks, and what rollouts have started."""
    pids, support = tmp_path / "pids", str(Path(hosted.__file__).parent)
    program = PLAYS.format(support=support, address=nodes.cluster.address, pids=str(pids))
    # The cluster requires a token if this process does, which a test before this one may have caused.
    mode = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}
    driver = subprocess.Popen([sys.executable, "-c", program], env=os.environ | mode)
    try:
        eventually(lambda: driver.poll() is None and pids.is_file() and len(pids.read_text().split()) == 4)
        written = [int(pid) for pid in pids.read_text().split()]
        actor = psutil.Process(written[0]).parent()
        assert actor is not None
        around = actor.parent().children(recursive=True)  # type: ignore[union-attr]
        workers = [each.pid for each in around if "rllm_core.hosts.worker" in " ".join(each.cmdline())]
    finally:
        driver.kill()
        driver.wait()
    eventually(lambda: not any(is_running(pid) for pid in {*written, *workers, actor.pid}))


OWN = """
import json, sys
import rllm_core
settings = json.loads(sys.argv[2])
resume = sys.argv[3] == "resume"
rllm_core.train(None if resume else sys.argv[4], None if resume else settings, run_dir=sys.argv[1], resume=resume)
"""


def start(folder: Path, how: str, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts a run in a process of its own."""
    command = [sys.executable, "-c", OWN, str(folder), json.dumps(settings), how, HELD]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_with_its_own_ray_can_resume(kills: int, tmp_path: Path, must_end: MustEnd) -> None:
    """Its Ray ends with it, though two of Ray's processes try for a minute to report that theirs has died."""
    folder, how = tmp_path / "run", "train"
    hold = Hold(tmp_path / "hold", folder)
    settings = SMALL | {"training.steps": 2 * kills + 1, "backend": "local"} | hold.settings
    whole = train(tmp_path / "whole", HELD, **settings)
    for kill in range(kills):
        hold.allow(1 + 2 * kill)
        run = start(folder, how, settings | RAY)
        how = "resume"
        hold.wait_for(1 + 2 * kill, process=run)
        everything = psutil.Process(run.pid).children(recursive=True)
        assert any("rllm_core.hosts.worker" in " ".join(each.cmdline()) for each in everything)
        late = [each for each in everything if command_line(each).startswith(RAYS_OWN)]
        must_end(late)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        eventually(lambda: not any(is_running(each.pid) for each in everything if each not in late))  # noqa: B023
    hold.allow(10**6)
    assert start(folder, "resume", settings).wait() == 0
    assert metrics(folder) == metrics(whole)
    assert verify(folder).problems == []


def test_what_cannot_work_is_said(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rollout.python = '/nowhere/python'"):
        played("Talk", ["plain"], workers=1, python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"is not the Ray cluster that this process uses"):
        played("Talk", ["plain"], workers=1, ray={"address": "127.0.0.1:1"})
    monkeypatch.setattr(rllm_ray.host, "START_SECONDS", 0.5)
    with pytest.raises(RunError, match=r"no room for worker 1 .* it wants 1000 CPU"):
        played("Talk", ["plain"], workers=1, ray={"num_cpus": 1000})
