"""Tests workflows that are joined to one: a run trains on a mixture of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from rllm_samplers.joined import JoinedWorkflow

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.workflow import Conversation, LazyTasks, Workflow
from rllm_devkit import scripted_plugin
from rllm_devkit.checks import check_workflow
from rllm_devkit.scripted import ScriptedWorkflow
from rllm_viewer.verify import verify

ENV = """
from rllm_devkit.scripted import ScriptedWorkflow
from rllm_samplers.joined import JoinedWorkflow

class Both(JoinedWorkflow):
    def workflows(self):
        return {"first": ScriptedWorkflow(), "second": ScriptedWorkflow(), "third": ScriptedWorkflow()}
"""


class Joined(JoinedWorkflow):
    name = "joined"

    def workflows(self) -> dict[str, Workflow]:
        return {"one": ScriptedWorkflow(), "two": ScriptedWorkflow()}


def test_it_keeps_the_contract_of_workflows() -> None:
    results = asyncio.run(check_workflow(Joined))
    assert not [result for result in results if result.outcome == "failed"], results


@pytest.mark.slow
@pytest.mark.parametrize("host", ["inline", "processes"])
def test_a_run_trains_on_a_mixture_of_workflows(tmp_path: Path, host: str) -> None:
    env = tmp_path / "both.py"
    env.write_text(ENV)
    plugins = PluginManager.from_environment()
    plugins.register(scripted_plugin, "testing")
    overrides = (
        "training.steps=5", "training.groups_per_step=8", "training.rollouts_per_group=4", f"rollout.host={host}",
        "training.sampler=mixture", "training.sampler_options={weights={first=4, second=1, third=0}}",
        "training.validation_rollouts=60", "rollout.workers=1",
    )  # fmt: skip
    if host == "inline":
        overrides = overrides[:-1]
    config = load_run_config(str(env), plugins, overrides=overrides, backend="scripted")
    asyncio.run(launch.train(assemble(config, plugins), tmp_path / "run", resume=False, progress=Progress()))
    assert verify(tmp_path / "run").problems == []
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    trained = Counter(event["task"].partition("/")[0] for event in events if event["event"] == "dispatch")
    assert trained == {"first": 32, "second": 8}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"]
    assert metrics[-1]["sampler/passes/second"] > 0
    subset_of = {event["group"]: event["task"].partition("/")[0] for event in events if event["event"] == "dispatch"}
    group_of = {event["rollout"]: event["group"] for event in events if event["event"] == "start"}
    last = next(event["groups"] for event in reversed(events) if event["event"] == "consume")
    finished = [event for event in events if event["event"] == "finish" and group_of.get(event["rollout"]) in last]
    for subset in ("first", "second"):
        own = [event for event in finished if subset_of[group_of[event["rollout"]]] == subset]
        rewards = [event["trajectories"][0]["reward"] for event in own]
        assert metrics[-1][f"workflow/{subset}/reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert metrics[-1][f"workflow/{subset}/solved"] == sum(event["is_correct"] for event in own) / len(own)
    validation = next(event for event in reversed(events) if event["event"] == "validation")
    assert validation["metrics"].keys() >= {f"{name}/solved" for name in ("first", "second", "third")}


def test_endless_tasks_cannot_be_joined() -> None:
    class Endless(ScriptedWorkflow):
        def tasks(self, split: object) -> LazyTasks:
            return LazyTasks(lambda number: ScriptedWorkflow().tasks("train")[0])

    class Wrong(Joined):
        def workflows(self) -> dict[str, Workflow]:
            return {"one": ScriptedWorkflow(), "endless": Endless()}

    with pytest.raises(ValueError, match="'endless' has endless train tasks, which cannot be joined"):
        Wrong().tasks("train")


def test_a_name_with_a_slash_is_rejected() -> None:
    class Slashed(Joined):
        def workflows(self) -> dict[str, Workflow]:
            return {"one": ScriptedWorkflow(), "two/long": ScriptedWorkflow()}

    with pytest.raises(ValueError, match="the name 'two/long' has a '/'"):
        Slashed().tasks("train")


def test_workflows_take_turns_in_the_warm_start() -> None:
    class Warm(ScriptedWorkflow):
        def warm_start(self, rng: random.Random) -> object:
            return iter([[{"role": "assistant", "content": "warm"}]] * 9)

    class Other(ScriptedWorkflow):
        def warm_start(self, rng: random.Random) -> object:
            return iter([[{"role": "assistant", "content": "other"}]] * 9)

    class Both(Joined):
        def workflows(self) -> dict[str, Workflow]:
            return {"warm": Warm(), "cold": ScriptedWorkflow(), "other": Other()}

    found = Both().warm_start(random.Random(0))
    assert found is not None
    said: list[Conversation] = [next(found) for _ in range(4)]
    assert [one[0]["content"] for one in said] == ["warm", "other"] * 2
    assert Joined().warm_start(random.Random(0)) is None
