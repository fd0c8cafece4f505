"""Workflow ``openenv`` against a real server of the same protocol."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rllm_environments.openenv.session import OpenEnvError, SessionRefused, Unreachable, address
from rllm_environments.openenv.workflow import OpenEnvConfig, OpenEnvWorkflow

from rllm_core.engine import TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.types import SamplingParams, TerminationReason
from rllm_devkit.checks.workflows import check_workflow
from rllm_devkit.scripted import Script, ScriptedEngine

_spec = importlib.util.spec_from_file_location("openenv_server", Path(__file__).with_name("openenv_server.py"))
assert _spec is not None
assert _spec.loader is not None
openenv_server = importlib.util.module_from_spec(_spec)
sys.modules["openenv_server"] = openenv_server
_spec.loader.exec_module(openenv_server)
Behavior, server = openenv_server.Behavior, openenv_server.server


def rollout_of(workflow, answer, number=0):
    engine = ScriptedEngine(script=Script(good=answer), skill=1.0)
    completer = TITOCompleter(engine, sampling_params=SamplingParams(max_response_tokens=64))
    return workflow.run(workflow.tasks("train")[number], completer)


def played(behavior, answer, rollouts=1, **settings):
    """Returns what each of several concurrent rollouts gave: an episode, or an exception."""

    async def all_of_them():
        async with server(behavior) as url:
            workflow = OpenEnvWorkflow(OpenEnvConfig(url=url, action_field="take", **settings))
            await workflow.open()
            runs = [rollout_of(workflow, answer, number) for number in range(rollouts)]
            return await asyncio.gather(*runs, return_exceptions=True)

    return asyncio.run(all_of_them())


def test_an_episode_has_the_rewards_of_the_server():
    behavior = Behavior()
    [episode] = played(behavior, "1")
    [trajectory] = episode.trajectories
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 1.0]
    assert [step.messages[-1]["content"] for step in trajectory.steps] == [
        '{"left": 3}',
        '{"left": 2}',
        '{"left": 1}',
    ]
    assert episode.is_correct
    assert behavior.seeds[-1] == 0


@pytest.mark.parametrize("politely", [True, False])
def test_a_refused_session_is_an_error_and_never_an_episode(politely):
    found = played(Behavior(refuses_politely=politely), "1", rollouts=3, sessions=3)
    refused = [each for each in found if isinstance(each, SessionRefused)]
    assert len(refused) == 2
    assert len([each for each in found if not isinstance(each, Exception)]) == 1


def test_rollouts_wait_for_the_sessions_that_a_server_has():
    found = played(Behavior(capacity=2), "1", rollouts=6, sessions=1)
    assert [each.is_correct for each in found] == [True] * 6


def test_a_session_that_ends_politely_in_play_is_an_error():
    [found] = played(Behavior(closes_after_steps=1), "1")
    assert isinstance(found, OpenEnvError)
    assert not isinstance(found, SessionRefused)


def test_an_answer_that_is_no_action_ends_the_rollout():
    [episode] = played(Behavior(), "many")
    assert episode.trajectories[0].total_reward == -1
    assert episode.metrics["no_action"] == 1
    assert not episode.is_correct


def test_an_episode_without_any_reward_is_an_error():
    [found] = played(Behavior(gives_rewards=False), "1")
    assert isinstance(found, OpenEnvError)


def test_an_end_that_is_not_true_or_false_is_an_error():
    [found] = played(Behavior(writes_done_as_text=True), "1")
    assert isinstance(found, OpenEnvError)


def test_turns_are_limited():
    [episode] = played(Behavior(), "1", max_turns=2)
    assert episode.termination_reason is TerminationReason.MAX_TURNS


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "ws://host:8000/ws"),
        ("https://host/env/", "wss://host/env/ws"),
        ("ws://host:1/ws", "ws://host:1/ws"),
    ],
)
def test_addresses(url, expected):
    assert address(url) == expected


@pytest.mark.parametrize("url", ["host:8000", "", "ftp://host"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"openenv\.url"):
        OpenEnvWorkflow(OpenEnvConfig(url=url))


def test_a_server_that_is_not_there_is_named_when_a_run_opens():
    workflow = OpenEnvWorkflow(OpenEnvConfig(url="ws://127.0.0.1:9", timeout_seconds=5))
    with pytest.raises(ConfigError, match="no connection"):
        asyncio.run(workflow.open())


def test_a_rollout_waits_while_the_server_restarts():
    async def restarted():
        async with server(Behavior()) as url:
            workflow = OpenEnvWorkflow(OpenEnvConfig(url=url, action_field="take"))
            await workflow.open()
        rollout = asyncio.create_task(rollout_of(workflow, "1"))
        while workflow._unreachable_since is None and not rollout.done():
            await asyncio.sleep(0.01)
        async with server(Behavior(), urlsplit(url).port):
            return await rollout

    assert asyncio.run(restarted()).is_correct


def test_only_the_first_rollouts_wait_for_a_server_that_stays_away(monkeypatch):
    async def twice():
        workflow = OpenEnvWorkflow(OpenEnvConfig(url="ws://127.0.0.1:9", action_field="take", timeout_seconds=0.1))
        with pytest.raises(Unreachable):
            await rollout_of(workflow, "1")
        monkeypatch.setattr("rllm_environments.openenv.workflow.RETRY_SECONDS", 1e6)
        async with asyncio.timeout(60):
            with pytest.raises(Unreachable):
                await rollout_of(workflow, "1")

    asyncio.run(twice())


def test_contract():
    async def checked():
        async with server(Behavior(capacity=64)) as url:
            config = OpenEnvConfig(url=url, action_field="take", sessions=64, train_tasks=50, validation_tasks=9)
            return await check_workflow(lambda: OpenEnvWorkflow(config), answers=("1", "2", "3"), tasks_per_split=1)

    assert not [result for result in asyncio.run(checked()) if result.outcome == "failed"]
