"""The starter task trained through the command line: real verl, real vLLM, real weight sync, real kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ASYNCHRONOUS, Run, verify

GREATEST_GAP = 1e-5
CHECKPOINTED = ("training.steps=6", "training.checkpoint_every_steps=1", "rollout.max_consecutive_failures=16")


def complete(run: Run, steps: int) -> list[dict[str, float]]:
    """The metrics of a run that did what was planned, checked for what every run must show."""
    assert run.wait() == 0, run.printed()
    checked = verify(run.path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert run.summary()["status"] == "completed"
    metrics = run.lines("metrics")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    for line in metrics:
        assert line["sync_logprob_difference_max"] <= GREATEST_GAP
        assert line["grad_norm"] > 0
    return metrics


def test_killed_with_its_server_and_killed_itself_a_run_goes_on_to_its_end(model: Path, tmp_path: Path) -> None:
    """Colocated: the server is killed, then the driver; each resumed run goes on exactly behind the last checkpoint."""
    path = tmp_path / "run"
    run = Run.start(path, model, *CHECKPOINTED)
    run.wait_for_step(2)
    run.kill_one("VLLM::EngineCore")
    assert run.wait() == 1, run.printed()
    assert "a vLLM server died" in run.printed()
    assert run.summary()["status"] != "completed"

    run = Run.resume(path)
    done = len(run.lines("metrics"))
    assert done >= 1
    run.wait_for_step(done + 1)
    run.kill()

    run = Run.resume(path)
    metrics = complete(run, 6)
    assert sum(event["event"] == "begin" for event in run.lines("events")) == 3
    assert [line["weight_version"] for line in metrics] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("partial_rollout", ["true", "false"])
def test_asynchronous_training(model: Path, tmp_path: Path, partial_rollout: str) -> None:
    run = Run.start(
        tmp_path / "run", model, *ASYNCHRONOUS, "training.steps=5", f"training.partial_rollout={partial_rollout}"
    )
    metrics = complete(run, 5)
    assert max(line["staleness_max"] for line in metrics) >= 1
