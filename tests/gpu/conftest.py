"""Backend ``verl`` on GPUs: ``pytest -m gpu tests/gpu`` in an environment with ``rllm-verl[gpu]`` and ``rllm-local``.

Nothing here imports verl when it is collected, so that tests skip where there is neither verl nor a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_models import make_model


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the test before its fixtures are created; ``gpu(N)`` needs N GPUs."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    import torch

    [needed] = mark.args
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs, and {torch.cuda.device_count()} are here")


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a model of a shape in `benchmarks.gpu_models`, made on first use."""
    folders: dict[str, Path] = {}

    def made(shape: str) -> Path:
        if shape not in folders:
            folders[shape] = make_model(tmp_path_factory.mktemp(shape), shape, "cuda")
        return folders[shape]

    return made


@pytest.fixture(scope="session")
def model(model_of: Callable[[str], Path]) -> Path:
    """Folder with a model of random weights."""
    return model_of("0.5b")
