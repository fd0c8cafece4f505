"""Backend and engine on the real server, checked against their contracts with the core's public checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from rllm_tinker.backend import TinkerBackend
from server import ENGINE

from rllm_devkit.checks import check_backend

# A step has as many rows as the engine trains at a time: two groups.
SMALL = (
    f"training.rollouts_per_group={ENGINE['train_micro_batch_size'] // 2}",
    "rollout.max_response_tokens=6",
    "rollout.request_timeout_seconds=120",
    "optimizer.warmup_steps=0",
)
# Each combines a kind of sampler with a division of the step. In synchronous training, the trained model also samples.
PASSES = ("algorithm.aggregation=sequence_mean_token_mean", "algorithm.loss=ppo_clip")
OVERLAPPING = ("algorithm.aggregation=token_mean", "training.staleness_threshold=1", "training.partial_rollout=true")
GREATEST_GAP = 1e-4


@pytest.mark.parametrize(
    ("overrides", "skipped"),
    [
        pytest.param(PASSES, {"proximal", "reference engine"}, id="synchronous in passes", marks=pytest.mark.every_sdk),
        pytest.param(OVERLAPPING, {"accumulation", "proximal", "reference engine"}, id="asynchronous in one pass"),
    ],
)
async def test_the_contracts_are_kept(
    server, run_config, plugins, parser, tmp_path: Path, overrides: tuple[str, ...], skipped: set[str]
) -> None:
    results = await check_backend(
        lambda changed: TinkerBackend(changed, plugins),
        run_config(server, *SMALL, *overrides),
        parser,
        tmp_path,
        vocabulary_size=len(parser.tokenizer),
        resumes_in_another=True,
        logprob_tolerance=GREATEST_GAP,
    )
    assert [result for result in results if result.outcome == "failed"] == []
    assert {result.name for result in results if result.outcome == "skipped"} == skipped
