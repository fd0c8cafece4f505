"""The colocated backend and its engine, checked against their contracts with the core's public checks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rllm_verl.backend import VerlBackend
from verl_runs import run_config

from rllm_core.assembly.parts import assemble
from rllm_core.plugins import PluginManager
from rllm_devkit.checks import check_backend

GREATEST_GAP = 1e-5


def test_colocated_the_contracts_are_kept(model: Path, tmp_path: Path) -> None:
    plugins = PluginManager.from_environment()
    config = run_config(
        model,
        "algorithm.entropy_coefficient=0",
        "optimizer.learning_rate=0.001",
        "optimizer.warmup_steps=0",
        "rollout.max_response_tokens=6",
    )
    parser = assemble(config, plugins).parser()
    results = asyncio.run(
        check_backend(
            lambda changed: VerlBackend(changed, plugins),
            config,
            parser,
            tmp_path,
            vocabulary_size=len(parser.tokenizer),
            logprob_tolerance=GREATEST_GAP,
        )
    )
    assert [result for result in results if result.outcome == "failed"] == []
