"""Metric trackers for rllm-core, one module each. A tracker's library is imported only when the tracker is selected."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import TrackerProvider

__version__ = "0.1.0"
RLLM_CORE_API = "1.0"


@hookimpl
def trackers() -> list[TrackerProvider]:
    """Provides trackers ``mlflow``, ``swanlab``, ``tensorboard``, ``trackio`` and ``wandb``."""
    return [
        TrackerProvider(
            name="mlflow",
            load="rllm_trackers.mlflow:MlflowTracker",
            config="rllm_trackers.mlflow:MlflowConfig",
            summary="MLflow: a database next to the run folder, or a server.",
        ),
        TrackerProvider(
            name="swanlab",
            load="rllm_trackers.swanlab:SwanlabTracker",
            config="rllm_trackers.swanlab:SwanlabConfig",
            summary="SwanLab: offline in the run folder, or the SwanLab cloud.",
        ),
        TrackerProvider(
            name="tensorboard",
            load="rllm_trackers.tensorboard:TensorboardTracker",
            config="rllm_trackers.tensorboard:TensorboardConfig",
            summary="TensorBoard: event files in the run folder.",
        ),
        TrackerProvider(
            name="trackio",
            load="rllm_trackers.trackio:TrackioTracker",
            config="rllm_trackers.trackio:TrackioConfig",
            summary="Trackio: a local database in Trackio's own folder, a server, or a Hugging Face Space.",
        ),
        TrackerProvider(
            name="wandb",
            load="rllm_trackers.wandb:WandbTracker",
            config="rllm_trackers.wandb:WandbConfig",
            summary="Weights & Biases: offline in the run folder, or the W&B service.",
        ),
    ]
