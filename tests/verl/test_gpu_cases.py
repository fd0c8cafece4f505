"""The configurations of the tests on GPUs, composed on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rllm_verl import verl_api

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import request_of
from benchmarks.gpu_imports import compose
from benchmarks.gpu_models import describe
from benchmarks.verl_processes import SIDE_VARIABLE
from benchmarks.verl_workloads import Workload, check_settings, main_ppo_settings


def test_every_case_composes_and_fits_on_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = compose()
    dataclass = verl_api.use("omega_conf_to_dataclass")
    for name, verl in found.items():
        sections = verl.actor_rollout_ref
        assert dataclass(sections.rollout).name == "vllm", name
        if name != "megatron":
            assert dataclass(sections.actor).strategy == "fsdp2", name
    assert found["direct_send"].actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes == 1
    assert found["sequence_parallel"].actor_rollout_ref.actor.ulysses_sequence_parallel_size == 2
    assert found["float32"].actor_rollout_ref.model.override_config.attn_implementation == "sdpa"
    assert found["experts"].actor_rollout_ref.rollout.expert_parallel_size == 4
    assert found["whole_run"].actor_rollout_ref.actor.fsdp_config.param_offload
    assert not found["adapters"].actor_rollout_ref.model.lora.merge
    assert found["merged_adapters"].actor_rollout_ref.model.lora.merge


def test_both_sides_on_a_gpu_have_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIDE_VARIABLE, "main_ppo")
    request = request_of("main_ppo", describe(tmp_path / "model", "0.5b"), "cuda", "127.0.0.1:1")
    del request["side"]
    workload = Workload(**request)
    arguments = main_ppo_settings(workload, tmp_path)
    check_settings(workload, arguments)
    # The comparison sees what differs.
    changed = [argument.replace("enforce_eager=False", "enforce_eager=True") for argument in arguments]
    with pytest.raises(ValueError, match="enforce_eager"):
        check_settings(workload, changed)
