"""The example run files are valid, hosted and on a self-hosted server, where they train."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import StartRun
from in_process import run_in_process
from server import REPOSITORY, TinkerServer

from rllm_viewer.verify import verify

# Two numbers up to 50, which is what the model was taught the form of; a sum reaches about half of these targets.
SMALL_NUMBERS = (
    "countdown.numbers=2",
    "countdown.largest=50",
    "countdown.largest_target=100",
    "countdown.train_tasks=1500",
    "countdown.validation_tasks=200",
    "rollout.max_response_tokens=16",
)
STEPS, FEW_STEPS = 36, 5
# By how much the share of the 200 held-out tasks that are solved must rise. Chance moves it by about 0.03.
MARGIN = 0.1
EXAMPLES = sorted((REPOSITORY / "plugins" / "rllm-tinker" / "examples").glob("*.toml"))


def dry_run(path: Path, *overrides: str, key: str = "") -> subprocess.CompletedProcess[str]:
    options = [word for override in overrides for word in ("-o", override)]
    environment = os.environ | {"TINKER_API_KEY": key}
    return run_in_process(["train", str(path), "--dry-run", *options], folder=path.parent, environment=environment)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid(path: Path) -> None:
    hosted = dry_run(path, key="tml-only-for-show")
    assert hosted.returncode == 0, hosted.stderr
    assert "not checked: the hosted Tinker service" in hosted.stdout
    assert "not checked: weight syncs: whether the server samples with the weights that it trained" in hosted.stdout
    assert "tml-only-for-show" not in hosted.stdout + hosted.stderr
    own = dry_run(path, "tinker.base_url=http://localhost:8000", "tinker.service=skyrl", "optimizer.max_grad_norm=1e6")
    assert own.returncode == 0, own.stderr
    without_key = dry_run(path)
    assert without_key.returncode == 2
    assert "TINKER_API_KEY is not set" in without_key.stderr


def test_there_is_one_for_each_loop() -> None:
    assert [path.stem for path in EXAMPLES] == ["countdown-async", "countdown"]


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        pytest.param(path, steps, id=f"{path.stem}-{steps}", marks=marks)
        for path in EXAMPLES
        for steps, marks in (
            ((STEPS, ()),) if path.stem == "countdown" else ((FEW_STEPS, ()), (STEPS, pytest.mark.slow))
        )
    ],
)
def test_an_example_trains(path: Path, steps: int, countdown_server: TinkerServer, start_run: StartRun) -> None:
    """With a model and numbers that are small enough for this server; learns in ``STEPS`` steps.

    ``test_training.py`` learns asynchronously in less time, so the asynchronous example takes few steps here, and all
    of them in ``make tinker-seeds``.
    """
    run = start_run(
        countdown_server,
        *SMALL_NUMBERS,
        f"training.steps={steps}",
        "training.groups_per_step=8",
        "training.rollouts_per_group=16",
        "training.validation_rollouts=200",
        f"training.validate_every_steps={steps}",
        "optimizer.learning_rate=0.003",
        run_file=path,
    )
    assert run.wait() == 0, run.printed()
    before, after = (validation["solved"] for validation in run.summary()["validation"])
    print(f"{path.stem}: {before:.3f} -> {after:.3f}")
    assert before > 0
    if steps == STEPS:
        assert after > before + MARGIN
    metrics = run.lines("metrics")
    assert len(metrics) == steps
    gaps = [line["rollout_logprob_difference_max"] for line in metrics if "rollout_logprob_difference_max" in line]
    assert gaps
    assert max(gaps) < 1e-4
    oldest = max(line["staleness_max"] for line in metrics)
    assert oldest == 0 if path.stem == "countdown" else oldest >= 1
    assert verify(run.path).problems == []
