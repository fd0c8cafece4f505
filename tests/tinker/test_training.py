"""Complete runs of the starter task, each in its own process, on the shared server."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from conftest import StartRun
from server import TinkerServer
from sorting_agent import check_agent, written_agent

from rllm_viewer.verify import verify

SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)))
STEPS = 24
# Required increase of the mean reward from the first 10 to the last 10 steps. Chance moves such a mean of 640 rewards
# by about 0.02.
MARGIN = 0.1
GREATEST_GAP = 1e-4
ASYNCHRONOUS = (
    "training.staleness_threshold=0.5",
    "training.trigger_parameter_sync_step=2",
    "training.partial_rollout=true",
    "algorithm.loss=ppo_clip",
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "overrides",
    [pytest.param((), id="synchronous", marks=pytest.mark.slow), pytest.param(ASYNCHRONOUS, id="asynchronous")],
)
def test_the_starter_task_is_learned(server: TinkerServer, start_run: StartRun, overrides, seed: int) -> None:
    """One seed and mode in ``make test-tinker``; the others in ``make tinker-seeds``.

    The synchronous example of ``test_examples.py`` learns in ``make test-tinker`` too.
    """
    seen = server.request_count()
    run = start_run(server, f"training.steps={STEPS}", f"training.seed={seed}", *overrides)
    assert run.wait() == 0, run.printed()
    metrics = run.lines("metrics")
    rewards = [line["reward_mean"] for line in metrics]
    assert len(rewards) == STEPS
    assert fmean(rewards[-10:]) - fmean(rewards[:10]) > MARGIN, rewards
    gaps = [line["rollout_logprob_difference_max"] for line in metrics if "rollout_logprob_difference_max" in line]
    assert gaps
    assert max(gaps) < GREATEST_GAP
    assert verify(run.path).problems == []
    oldest = max(line["staleness_max"] for line in metrics)
    assert oldest == 0 if not overrides else oldest >= 1
    versions = sum(event["event"] == "sync" for event in run.events())
    assert versions == (STEPS // 2 + 1 if overrides else STEPS + 1)
    # A restored model (see README.md on optimizer steps that run ahead) needs a new sampler.
    again = sum(line["recoveries"] for line in metrics)
    assert server.requests(seen)["save_weights_for_sampler"] == versions + again


def test_weights_are_saved_once_per_version(server: TinkerServer, start_run: StartRun) -> None:
    seen = server.request_count()
    run = start_run(server, "training.steps=7", "training.trigger_parameter_sync_step=3")
    assert run.wait() == 0, run.printed()
    versions = [event["version"] for event in run.events() if event["event"] == "sync"]
    assert versions == [0, 1, 2, 3]  # at the start, after steps 3 and 6, and after the last
    again = sum(line["recoveries"] for line in run.lines("metrics"))
    assert server.requests(seen)["save_weights_for_sampler"] == len(versions) + again
    assert [line["weight_version"] for line in run.lines("metrics")] == [0, 0, 1, 1, 1, 2, 3]
    gaps = [line["rollout_logprob_difference_max"] for line in run.lines("metrics")[::3]]
    assert max(gaps) < GREATEST_GAP


def test_an_agent_is_trained(server: TinkerServer, start_run: StartRun, tmp_path: Path) -> None:
    small = ("steps=3", "groups_per_step=4", "rollouts_per_group=4", "validation_rollouts=0")
    settings = ["optimizer.learning_rate=0.005", *(f"training.{one}" for one in small)]
    run = start_run(server, *settings, run_file=written_agent(tmp_path, "tinker"))
    assert run.wait() == 0, run.printed()
    check_agent(run.lines("metrics"))
    assert max(line["rollout_logprob_difference_max"] for line in run.lines("metrics")) < GREATEST_GAP
    assert verify(run.path).problems == []


@pytest.mark.every_sdk
def test_a_resumed_run_goes_on_where_it_stopped(server: TinkerServer, start_run: StartRun) -> None:
    run = start_run(server, "training.steps=400", "training.checkpoint_every_steps=2")
    run.wait_for_step(3)
    run.process.terminate()
    assert run.wait() == 128 + 15, run.printed()
    stopped_at = run.summary()["optimizer_steps"]
    resumed = start_run(server, resume=True)
    resumed.wait_for_step(stopped_at + 2)
    resumed.process.terminate()
    assert resumed.wait() == 128 + 15, resumed.printed()
    summary = resumed.summary()
    assert summary["resumed_from_step"] == stopped_at
    assert summary["optimizer_steps"] >= stopped_at + 2
    steps = [line["step"] for line in resumed.lines("metrics")]
    assert steps == list(range(1, summary["optimizer_steps"] + 1))
    assert [line["weight_version"] for line in resumed.lines("metrics")] == steps
    gaps = [line["rollout_logprob_difference_max"] for line in resumed.lines("metrics")]
    assert max(gaps) < GREATEST_GAP
    assert verify(run.path).problems == []


def test_what_only_the_hosted_service_does_is_asked_for(server: TinkerServer, start_run: StartRun) -> None:
    """This server does not sum losses, clip or delete, but all requests are sent and none fails the run."""
    run = start_run(
        server,
        "tinker.service=hosted",
        "tinker.checkpoint_ttl_seconds=1000",
        "optimizer.max_grad_norm=1.0",
        "training.steps=4",
        "training.checkpoint_every_steps=1",
        "training.keep_checkpoints=1",
    )
    assert run.wait() == 0, run.printed()
    deleted = [line for line in run.printed().splitlines() if "deleting tinker://" in line]
    assert len(deleted) == 2, run.printed()  # of four; the latest is not complete yet, so its predecessor stays too
    assert "-checkpoint-step-000001-" in deleted[0]
    assert "sync_only" not in run.printed()  # in the SDK's warning about blocking calls on the event loop
