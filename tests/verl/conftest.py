"""Test suite of backend ``verl``: real verl and real vLLM on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cpu_environment import environment_variables

# Set before the test modules import verl, which reads these at import time.
os.environ.update(environment_variables())
# In the environment's folder, so that both are deleted together; `make verl-env` creates the model.
os.environ["RLLM_CACHE_DIR"] = str(Path(sys.prefix) / "cache")

from hold import MustEnd, eventually, is_running
from rank_runs import RANKS, Report, train
from rllm_local.starter import starter_model


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of the starter model."""
    return starter_model()


@pytest.fixture(scope="session")
def model_for_countdown() -> Path:
    """Folder of a model that answers in the format of ``countdown``."""
    return starter_model(task="countdown")


@pytest.fixture(scope="session")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Output of ``training_rank.py`` on two ranks, which tests must not change."""
    return train(model, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.fixture(scope="session")
def must_end() -> Iterator[MustEnd]:
    """``must_end(processes)``: they end by themselves, which is checked after the last test, because it takes long."""
    found: list[psutil.Process] = []
    yield found.extend
    eventually(lambda: not any(each.is_running() and is_running(each.pid) for each in found))
