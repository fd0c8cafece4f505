"""Tests the benchmark of asynchrony on ``local``: figures from raw rows, modes, and the waiting workflow."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest
import rllm_local
import rllm_renderers
import rllm_workflows

from benchmarks import local_async, waiting
from rllm_core.assembly.parts import assemble
from rllm_core.plugins import PluginManager
from rllm_core.types import Step, Task

FILLING = [9.0] * local_async.WARM_UP_STEPS


def run_row(mode: str, seed: int, step_seconds: list[float], *, cpu: float, solved: float) -> dict[str, Any]:
    return {
        "kind": "run",
        "mode": mode,
        "seed": seed,
        "step_seconds": [*FILLING, *step_seconds],
        "cpu_seconds": cpu,
        "solved_after": solved,
        "staleness_mean": 0.5,
    }


def test_figures_compare_runs_of_one_seed() -> None:
    rows: list[dict[str, Any]] = [{"kind": "conditions"}]
    for seed, factor, solved in ((0, 0.5, 0.9), (1, 0.6, 1.0), (2, 0.9, 0.8)):
        pace = 1.0 + seed  # a different machine load for each seed
        rows.append(run_row("synchronous", seed, [pace, pace], cpu=10.0, solved=1.0))
        uneven = [0.0, 2 * pace * factor]
        rows.append(run_row("in_flight_eta1", seed, uneven, cpu=12.0 + seed, solved=solved))
    rows.append(run_row("in_flight_eta2", 7, [1.0], cpu=1.0, solved=0.5))
    found = local_async.figures(rows)
    assert found["local_async_over_sync"] == found["in_flight_eta1_over_sync"] == 0.6
    assert found["in_flight_eta1_over_sync_cpu"] == 1.3
    assert found["synchronous_step_ms"] == 2000
    assert found["in_flight_eta1_solved_after_min"] == 0.8
    assert found["in_flight_eta1_solved_after_mean"] == 0.9
    assert found["in_flight_eta1_seeds"] == 3
    assert "in_flight_eta2_over_sync" not in found, "there is no synchronous run of its seed"


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    provided = (("local", rllm_local), ("renderers", rllm_renderers), ("workflows", rllm_workflows))
    for name, plugin in (*provided, ("waiting", waiting)):
        manager.register(plugin, name)
    return manager


@pytest.mark.parametrize("name", local_async.MODES)
def test_every_mode_is_a_run_that_can_start(plugins: PluginManager, name: str) -> None:
    config = local_async.configured(plugins, local_async.MODES[name], 3, None)
    assert config.training.steps == 250, "the run file of guess"
    capabilities = assemble(config, plugins).backend.capabilities(config)
    assert capabilities.colocated == (name == "synchronous")
    assert config.training.partial_rollout == name.startswith("in_flight")


def test_rollouts_wait_between_turns_and_not_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    async def sleep(seconds: float) -> None:
        events.append(seconds)

    class Completer:
        seed = 5

        async def complete(self, messages: Any) -> Step:
            turn = sum(message["role"] == "assistant" for message in messages)
            said = ("1", "1higher2", "2higher5")[turn]
            events.append(said)
            response = {"role": "assistant", "content": said}
            return Step(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], weight_version=0, response=response)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    task = Task(task_id="guess-5", data={"secret": 5})
    episode = asyncio.run(waiting.WaitingGuess().run(task, Completer()))  # type: ignore[arg-type]
    seconds = waiting.wait_seconds(5)
    assert events == ["1", seconds, "1higher2", seconds, "2higher5"]
    assert episode.is_correct


def test_waits_have_the_mean_they_say() -> None:
    waits = [waiting.wait_seconds(seed) for seed in range(4000)]
    assert statistics.fmean(waits) == pytest.approx(waiting.MEAN_WAIT_SECONDS, rel=0.05)
    assert statistics.quantiles(waits, n=100)[-1] > 2 * waiting.MEAN_WAIT_SECONDS
