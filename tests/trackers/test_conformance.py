"""The tracker contract, checked with the real libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from readers import READERS
from rllm_trackers.mlflow import MlflowConfig, MlflowTracker
from rllm_trackers.swanlab import SwanlabConfig, SwanlabTracker
from rllm_trackers.tensorboard import TensorboardConfig, TensorboardTracker
from rllm_trackers.trackio import TrackioConfig, TrackioTracker
from rllm_trackers.wandb import WandbConfig, WandbTracker

from rllm_devkit.checks import check_tracker

TRACKERS: dict[str, Any] = {
    "mlflow": lambda: MlflowTracker(MlflowConfig()),
    "swanlab": lambda: SwanlabTracker(SwanlabConfig()),
    "tensorboard": lambda: TensorboardTracker(TensorboardConfig()),
    "wandb": lambda: WandbTracker(WandbConfig()),
    # Must be last: its threads outlive a killed run, and would write to its own folder during checks of others.
    "trackio": lambda: TrackioTracker(TrackioConfig()),
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_trackers_pass_the_public_checks(tracker: str, runs: Path) -> None:
    results = check_tracker(TRACKERS[tracker], runs, read=READERS[tracker], local=tracker != "trackio")
    assert [result for result in results if result.outcome == "failed"] == []
    assert {result.name for result in results if result.outcome == "skipped"} == (
        {"locality"} if tracker == "trackio" else set()
    )
