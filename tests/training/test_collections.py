"""Tests what a run does with Python's garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rllm_core.runs.launch import rare_collections


@pytest.fixture
def frozen_as_before() -> Iterator[None]:
    """Freezes again what the tests' process had frozen."""
    yield
    gc.freeze()


@pytest.mark.usefixtures("frozen_as_before")
def test_a_run_freezes_what_is_allocated_and_leaves_collections_as_they_were() -> None:
    gc.unfreeze()
    thresholds = gc.get_threshold()
    with rare_collections():
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() != thresholds
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


@pytest.mark.usefixtures("frozen_as_before")
def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with rare_collections():
        pass
    assert gc.get_freeze_count() > 10_000
