"""The lane of verl: real verl and real vLLM on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cpu_environment import environment_variables

# verl reads these when it is imported, which the test modules do.
os.environ.update(environment_variables())
# Goes away with the environment; `make verl-env` has made the model.
os.environ["RLLM_CACHE_DIR"] = str(Path(sys.prefix) / "cache")

from rllm_local.starter import starter_model


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of the starter model."""
    return starter_model()
