"""The comparison with verl's own ``main_ppo`` gives both sides the same settings, or it would refuse to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks are no package of any distribution

from benchmarks.verl_processes import SIDE_VARIABLE
from benchmarks.verl_workloads import SHAPES, Workload, check_settings, main_ppo_settings


@pytest.mark.parametrize("lora_rank", [0, 8], ids=["all-weights", "adapters"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_both_sides_have_the_same_settings(
    name: str, lora_rank: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIDE_VARIABLE, "main_ppo")
    workload = Workload(name, str(model), ray_address="127.0.0.1:1", steps=3, seed=0, lora_rank=lora_rank)
    check_settings(workload, main_ppo_settings(workload, tmp_path))
