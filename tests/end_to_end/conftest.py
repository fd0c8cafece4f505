"""Trains for `benchmarks.supervised` in forks, which have imported torch already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from forked import Forks

from benchmarks import supervised


@pytest.fixture
def supervised_in_forks(forking: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the measured processes of `benchmarks.supervised`, whose times no test reads."""

    def train(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
        process = forking.start(command[3:], output=tmp_path / "output", environment=environment)
        assert process.wait() == 0, process.err
        return {}

    monkeypatch.setattr(supervised, "measured", train)
