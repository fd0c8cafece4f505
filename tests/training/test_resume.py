"""Tests stop and resume: signals, kill -9, checkpoints, and equality with an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.folder import RunDir
from rllm_core.runs import launch
from rllm_core.version import __version__
from rllm_viewer.verify import verify

STEPS = 40
COMMAND = """
import os, signal, sys
from pathlib import Path

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup make test ignores it, which children inherit
import rllm_devkit.scripted_plugin
from rllm_devkit import scripted
from rllm_core.cli import main
from rllm_core.plugins import PluginManager

original = PluginManager.from_environment.__func__

def with_scripted(cls, **options):
    manager = original(cls, **options)
    manager.register(rllm_devkit.scripted_plugin, "testing")
    return manager

PluginManager.from_environment = classmethod(with_scripted)
held_from = Path(sys.argv[sys.argv.index("--run-dir") + 1], "checkpoints", os.environ["HELD_FROM"])
answered_while_held = 0

def latency(generator):
    global answered_while_held
    answered_while_held += held_from.exists()
    return 0.01 if answered_while_held < 7 else 3600

scripted.ScriptedBackend.script.latency_seconds = latency
main()
"""


HUNG_THREAD = """
import threading, time
from rllm_core.runs import launch

launch.SHUTDOWN_TIMEOUT_SECONDS = 0.2

async def shutdown(self):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    await launch.asyncio.sleep(3600)

scripted.ScriptedBackend.shutdown = shutdown
main()
"""


STATEFUL = """
from rllm_core import hookimpl
import hashlib

class Diary:
    digest, told = "", 0

    @hookimpl
    def on_batch_end(self, metrics):
        self.digest = hashlib.sha256(f"{self.digest} {sorted(metrics.items())}".encode()).hexdigest()
        self.told += 1

    @hookimpl
    def save_plugin_state(self):
        return {"digest": self.digest, "told": self.told}

    @hookimpl
    def load_plugin_state(self, saved):
        self.digest, self.told = saved["digest"], saved["told"]

with_diary = PluginManager.from_environment.__func__

def with_both(cls, **options):
    manager = with_diary(cls, **options)
    manager.register(Diary(), "diary")
    return manager

PluginManager.from_environment = classmethod(with_both)
main()
"""


SLOW_START = """
import asyncio

async def init_rollout_engine(self, parser):
    (Path(sys.argv[sys.argv.index("--run-dir") + 1]) / "starting").touch()
    await asyncio.sleep(3600)

scripted.ScriptedBackend.init_rollout_engine = init_rollout_engine
main()
"""


def start(
    run_dir: Path, *more: str, backend: str = "scripted_colocated", command: str = COMMAND, held_from: str = "none"
) -> subprocess.Popen[str]:
    """Starts a run.

    ``held_from`` is a checkpoint, soon after which no request is answered: however slow this process is, the run has
    not ended before it stops it, and is in the middle of a step.
    """
    overrides = [f"training.steps={STEPS}", "training.groups_per_step=4", "training.rollouts_per_group=4",
                 "training.validation_rollouts=10", "training.checkpoint_every_steps=5"]  # fmt: skip
    options = [argument for override in overrides for argument in ("-o", override)]
    arguments = ["train", "say_yes", "--backend", backend, "--run-dir", str(run_dir), *options, *more]
    return subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RLLM_PLUGINS": "", "HELD_FROM": held_from},
    )


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_checkpoint(run_dir: Path, process: subprocess.Popen[str], after_step: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if any(int(path.name[5:]) >= after_step for path in checkpoint.complete(run_dir / "checkpoints")):
            return
        if process.poll() is not None:
            break
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"no checkpoint after step {after_step}: {process.communicate()}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    process = start(run_dir)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == f"run: {run_dir}"
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, uninterrupted: Path, how: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, held_from="step-000010")
    wait_for_checkpoint(run_dir, process, after_step=10)
    process.send_signal(how)
    process.communicate(timeout=600)
    assert process.returncode == (-9 if how is signal.SIGKILL else 128 + how)
    newest = int(checkpoint.complete(run_dir / "checkpoints")[-1].name[5:])
    assert 10 <= newest < STEPS
    assert verify(run_dir).problems == []
    if how is not signal.SIGKILL:
        stopped = json.loads((run_dir / "summary.json").read_text())
        assert stopped["status"] == "interrupted"
        assert_balanced(stopped)

    process = start(run_dir, "--resume")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["resumed_from_step"] == newest
    assert (run_dir / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    whole = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["validation"] == whole["validation"]
    assert summary["books"]["trained"] == STEPS * 16
    assert_balanced(summary)
    proven = verify(run_dir)
    assert (proven.problems, proven.steps, proven.incarnations) == ([], STEPS, 2)


def assert_balanced(summary: dict[str, Any]) -> None:
    books = summary["books"]
    assert books["dispatched"] == sum(books[key] for key in ("trained", "filtered", "failed", "cancelled"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_state_of_a_resumed_plugin_equals_that_of_an_uninterrupted_one(tmp_path: Path, how: signal.Signals) -> None:
    command = COMMAND.replace("main()", STATEFUL)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    process = start(whole, command=command)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    process = start(stopped, command=command, held_from="step-000010")
    wait_for_checkpoint(stopped, process, after_step=10)
    process.send_signal(how)
    process.communicate(timeout=600)
    assert steps_done(stopped) < STEPS
    process = start(stopped, "--resume", command=command)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    states = [checkpoint.read(run / f"checkpoints/step-{STEPS:06d}")["plugins"]["diary"] for run in (whole, stopped)]
    assert states[0] == states[1]
    assert states[0]["told"] == STEPS
    assert verify(stopped).problems == []


@pytest.mark.slow
def test_interrupted_before_training_begins(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, command=COMMAND.replace("main()", SLOW_START))
    deadline = time.monotonic() + 600
    while not (run_dir / "starting").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted by SIGINT", "who stops a run has made no error"
    assert "SIGINT received" in err, "a backend that still loads its model may delay the end"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert_balanced(summary)
    process = start(run_dir, "--resume")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "has no complete checkpoint: restarting at step 0" in err


@pytest.mark.slow
def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path, uninterrupted: Path) -> None:
    again, other = start(tmp_path / "again"), start(tmp_path / "other", "-o", "training.seed=1")
    for process in (again, other):
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    whole = (uninterrupted / "metrics.jsonl").read_bytes()
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == whole
    assert (tmp_path / "other" / "metrics.jsonl").read_bytes() != whole


@pytest.mark.slow
def test_asynchronous_run_resumes_without_losing_or_repeating_a_task(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = ("-o", "training.staleness_threshold=2", "-o", "training.partial_rollout=true")
    process = start(run_dir, *more, backend="scripted", held_from="step-000005")
    wait_for_checkpoint(run_dir, process, after_step=5)
    process.kill()
    process.communicate()
    process = start(run_dir, *more, "--resume", backend="scripted")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    trained = [ordinal for event in events if event["event"] == "step" for ordinal in event["groups"]]
    assert sorted(trained) == list(range(STEPS * 4)), "every task of the stream once"
    versions = [event["version"] for event in events if event["event"] == "sync" and event["reason"] == "step"]
    assert versions == sorted(set(versions)), "no version twice"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["books"]["cancelled"] == summary["books"]["dispatched"] - STEPS * 16


@pytest.mark.slow
def test_interrupted_in_the_middle_of_a_streamed_step(tmp_path: Path) -> None:
    """Groups that had finished forward and backward are trained exactly once, by the next launch."""
    run_dir = tmp_path / "run"
    more = ("-o", "training.groups_per_forward_backward=1", "-o", "rollout.max_concurrent_rollouts=2")
    process = start(run_dir, *more, backend="scripted", held_from="step-000005")
    wait_for_checkpoint(run_dir, process, after_step=5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 130
    stopped = json.loads((run_dir / "summary.json").read_text())
    assert stopped["books"]["cancelled"] > 0
    assert_balanced(stopped)
    process = start(run_dir, *more, "--resume", backend="scripted")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    trained = [ordinal for event in events if event["event"] == "step" for ordinal in event["groups"]]
    assert sorted(trained) == list(range(STEPS * 4))
    books = json.loads((run_dir / "summary.json").read_text())["books"]
    assert books["dispatched"] - books["cancelled"] == books["trained"] == STEPS * 16


@pytest.mark.slow
def test_without_a_checkpoint_it_starts_over_and_says_so(run_scripted: Any, tmp_path: Path) -> None:
    def broken(assembly: Any) -> None:
        async def update_policy(step: Any) -> None:
            raise OSError("the device is gone")

        assembly.backend.update_policy = update_policy

    run = run_scripted(prepare=broken)
    assert isinstance(run.error, OSError)
    assert run.summary["status"] == "failed"
    assert run.summary["books"]["cancelled"] == 16
    assert_balanced(run.summary)
    said = Said()
    again = run_scripted(resume=True, progress=said)
    assert again.error is None
    assert again.summary["resumed_from_step"] is None
    assert again.summary["incarnation"] == 1
    assert any("restarting at step 0" in note for note in said.notes)
    assert [row["step"] for row in again.lines("metrics")] == [1, 2, 3, 4, 5, 6]
    assert (again.path / "lost" / "0" / "events.jsonl").is_file()


class Said:
    """Display that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten(run_scripted: Any) -> None:
    run = run_scripted()
    before = (run.path / "metrics.jsonl").read_bytes()
    again = run_scripted()
    assert isinstance(again.error, ConfigError)
    assert "already holds a run; add --resume" in str(again.error)
    assert (run.path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("place", ["inner", "checkpoints/step-000001/deep/inner"])
def test_a_run_inside_another_would_be_lost_with_its_checkpoints(tmp_path: Path, place: str) -> None:
    config = RunConfig.model_validate({"workflow": "w", "backend": "b"})
    RunDir(tmp_path / "run", config, resume=False).close()
    (tmp_path / "run" / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=f"is inside the run folder {tmp_path}/run; choose one outside it"):
        RunDir(tmp_path / "run" / place, config, resume=False)
    assert not (tmp_path / "run" / place).exists()
    (tmp_path / "run.toml").touch()  # the user's own
    RunDir(tmp_path / "runs" / "other", config, resume=False).close()


@pytest.mark.slow
def test_resume_with_another_run_file_names_the_differences(run_scripted: Any) -> None:
    run_scripted()
    again = run_scripted("training.groups_per_step=2", "optimizer.learning_rate=0.5", resume=True)
    assert isinstance(again.error, ConfigError)
    assert "keys differ: optimizer.learning_rate, training.groups_per_step" in str(again.error)
    assert "start a new run from its weights: --init-from" in str(again.error)


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_not_suggested_as_initial_weights(run_scripted: Any) -> None:
    run = run_scripted()
    shutil.rmtree(run.path / "checkpoints")
    again = run_scripted("optimizer.learning_rate=0.5", resume=True, is_begun=False)
    assert isinstance(again.error, ConfigError)
    assert str(again.error).endswith("run file or these keys, or start a new run in another folder")


@pytest.mark.slow
def test_another_backend_is_named_before_the_keys_of_its_section(run_scripted: Any) -> None:
    run_scripted()
    again = run_scripted("algorithm.name=rloo", backend="scripted_colocated", resume=True)
    assert isinstance(again.error, ConfigError)
    assert "keys differ: backend, algorithm.name." in str(again.error)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused(run_scripted: Any) -> None:
    run = run_scripted()
    policy = run.path / "checkpoints/step-000006/backend/policy.json"
    policy.write_text(policy.read_text().replace("6", "7"))
    again = run_scripted(resume=True, is_sound=False)
    assert isinstance(again.error, RunError)
    assert "policy.json does not match its manifest" in str(again.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"), [(None, "plugins.json lacks launch 0"), ("[", "plugins.json is damaged: ")]
)
def test_a_run_without_its_list_of_launches_is_not_resumed(
    run_scripted: Any, content: str | None, message: str
) -> None:
    run = run_scripted()
    launches = run.path / "plugins.json"
    launches.unlink() if content is None else launches.write_text(content)
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    again = run_scripted(resume=True, is_sound=False)
    assert isinstance(again.error, RunError)
    assert message in str(again.error)
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before


@pytest.mark.slow
def test_other_plugins_than_in_the_previous_launch_are_noted(run_scripted: Any) -> None:
    run, said = run_scripted("training.checkpoint_every_steps=2"), Said()
    assert run_scripted("training.checkpoint_every_steps=2", resume=True, progress=said).error is None
    assert said.notes == []
    launches = json.loads((run.path / "plugins.json").read_text())
    launches[-1]["plugins"] |= {"core": "rllm-core 0.0.1", "gone": "rllm-gone 1.0"}
    (run.path / "plugins.json").write_text(json.dumps(launches))
    assert run_scripted("training.checkpoint_every_steps=2", resume=True, progress=said).error is None
    now = f"rllm-core {__version__}"
    note = f"changed since the previous launch: rllm-core 0.0.1 -> {now}, rllm-gone 1.0 -> not installed"
    assert said.notes == [note]


@pytest.mark.slow
def test_a_file_shorter_than_its_checkpoint_is_refused_before_anything_changes(run_scripted: Any) -> None:
    run = run_scripted()
    metrics, events = run.path / "metrics.jsonl", run.path / "events.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9])
    with events.open("a") as file:
        file.write("{}\n")  # as of a launch that was killed after its last checkpoint
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    again = run_scripted(resume=True, is_sound=False)
    assert isinstance(again.error, RunError)
    assert "metrics.jsonl has" in str(again.error)
    assert "restore the file, or start a new run from its weights: --init-from" in str(again.error)
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before


@pytest.mark.slow
def test_a_hung_thread_of_the_backend_does_not_keep_the_process(tmp_path: Path) -> None:
    process = start(tmp_path / "run", command=COMMAND.replace("main()", HUNG_THREAD))
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "shutdown of backend 'scripted_colocated' did not end within 0.2 s; leaving it running" in err


@pytest.mark.slow
def test_resuming_a_finished_run_does_nothing(run_scripted: Any) -> None:
    run = run_scripted()
    again = run_scripted(resume=True)
    assert again.error is None
    assert again.summary["optimizer_steps"] == 6
    assert again.lines("metrics") == run.lines("metrics")


@pytest.mark.slow
def test_pruning_keeps_the_newest_checkpoints(run_scripted: Any) -> None:
    run = run_scripted("training.checkpoint_every_steps=1", "training.keep_checkpoints=2")
    assert [path.name for path in checkpoint.complete(run.path / "checkpoints")] == ["step-000005", "step-000006"]
    assert len(list((run.path / "checkpoints").iterdir())) == 2


def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = checkpoint.begin(tmp_path, step)
        (folder / "weights").write_bytes(b"w" * step)
        if step == 1:
            checkpoint.commit(folder, {"step": step})
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-000001"]
    assert checkpoint.read(tmp_path / "step-000001")["step"] == 1
    with pytest.raises(RunError, match="not a complete checkpoint"):
        checkpoint.read(tmp_path / "step-000002")
    with pytest.raises(RunError, match="exists and is complete"):
        checkpoint.begin(tmp_path, 1)
    assert list(checkpoint.begin(tmp_path, 2).iterdir()) == [], "what a crash left is cleared away"


def test_the_command_to_continue_is_quoted_for_a_shell() -> None:
    assert launch.how_to_continue("sort", Path("my run")) == "rllm-core train --resume --run-dir 'my run'"


@pytest.mark.slow
def test_a_workflow_may_change_the_working_directory(
    run_scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder that a user names is most often relative."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def moves(assembly: Any) -> None:
        workflow = assembly.host.hosted.workflow
        play = workflow.run

        async def run(task: Any, completer: Any) -> Any:
            os.chdir(tmp_path / "elsewhere")
            return await play(task, completer)

        async def close() -> None:
            os.chdir(tmp_path)

        workflow.run, workflow.close = run, close

    found = run_scripted("training.checkpoint_every_steps=2", path=Path("run"), prepare=moves)
    assert (found.error, found.summary["status"]) == (None, "completed")
    assert not list((tmp_path / "elsewhere").iterdir())
