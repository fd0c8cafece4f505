"""Backend and engine, checked against the core's contracts with its public checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rllm_local.backend import LocalBackend
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_renderers.chat_template import ChatTemplateParser

from rllm_core.config import AlgorithmConfig, OptimizerConfig, RolloutConfig, RunConfig
from rllm_core.plugins import PluginManager
from rllm_devkit.checks import CheckResult, check_backend

Build = Callable[..., RunConfig]

PLUGINS = PluginManager.from_environment(no_plugins=True)
# Maximum difference between engine and trainer; in bfloat16 they round differently.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.1}


@pytest.fixture
def results(run_config: Build, model_folder: Path, tmp_path: Path) -> Callable[..., object]:
    """Returns the results of ``check_backend``; keywords replace sections."""

    async def check(local: LocalConfig, learning_rate: float, **sections: object) -> list[CheckResult]:
        config = run_config(
            local, **{"optimizer": OptimizerConfig(learning_rate=learning_rate, max_grad_norm=1e6), **sections}
        )
        return await check_backend(
            lambda changed: LocalBackend(changed, PLUGINS),
            config,
            ChatTemplateParser.from_model(model_folder),
            tmp_path,
            vocabulary_size=json.loads((model_folder / "config.json").read_text())["vocab_size"],
            resumes_in_another=True,
            logprob_tolerance=TOLERANCES[local.resolved(on_gpu=False).dtype],
        )

    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "learning_rate", "algorithm", "temperature"),
    [
        (LocalConfig(device="cpu"), 1e-3, AlgorithmConfig(), 1.0),
        (LocalConfig(device="cpu", generation="separated"), 1e-3, AlgorithmConfig(), 0.7),
        (
            LocalConfig(device="cpu", packing="padded"),
            1e-3,
            AlgorithmConfig(loss="ppo_clip", aggregation="sequence_mean_token_mean"),
            1.0,
        ),
        (LocalConfig(device="cpu", lora=LoRAConfig(rank=4)), 3e-2, AlgorithmConfig(loss="cispo"), 1.0),
        (LocalConfig(device="cpu", dtype="bfloat16"), 1e-2, AlgorithmConfig(), 1.0),
    ],
    ids=["defaults", "separated", "padded", "adapters", "bfloat16"],
)
async def test_the_contracts_are_kept(results, local, learning_rate, algorithm, temperature) -> None:
    rollout = RolloutConfig(max_response_tokens=8, temperature=temperature)
    found = await results(local, learning_rate, algorithm=algorithm, rollout=rollout)
    assert [result for result in found if result.outcome == "failed"] == []
    # The engine supports images of vision models only, and this model is not one. Generation in a thread of its own is
    # not deterministic, so what two engines sample cannot be compared.
    skipped = {"engine: media"} | ({"reference engine"} if local.generation == "separated" else set())
    assert {result.name for result in found if result.outcome == "skipped"} == skipped
