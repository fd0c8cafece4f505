"""Makes what the tests share importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("support")))

import pytest
from forked import Forks, forks


@pytest.fixture(scope="session")
def forking() -> Iterator[Forks]:
    """Starts commands and programs as forks of a process that has imported torch."""
    with forks() as made:
        yield made
