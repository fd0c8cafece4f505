"""The configurations of the tests on GPUs, composed on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rllm_verl import verl_api

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_imports import compose


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
