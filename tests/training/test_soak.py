"""Tests a long run with faults: no leaks of memory, threads, descriptors or tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak

EPISODES = 20_000


@pytest.mark.slow
def test_nothing_grows_in_a_long_run_with_faults(tmp_path: Path) -> None:
    result = soak(tmp_path, episodes=EPISODES, failed_share=0.01)
    assert result.trained == EPISODES
    assert result.failed_attempts > EPISODES * 0.005
    assert result.after == result.before
    assert result.tasks_left == 0
    assert result.bytes_per_episode_in_second_half < 200
