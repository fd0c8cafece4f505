"""Rewards equal those of the packages' own scorers, on more than 1,000 answers each; reasoning-gym has its own test."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
import warnings
from pathlib import Path

import gymnasium
import minigrid.core.actions
import pytest
from rllm_environments.gymnasium_text.workflow import NO_ACTION, GymnasiumConfig, GymnasiumWorkflow
from rllm_environments.openenv.workflow import OpenEnvConfig, OpenEnvWorkflow
from rllm_environments.textarena.game import Game
from rllm_environments.textarena.workflow import TextArenaConfig, TextArenaWorkflow

from rllm_core.engine import TITOCompleter
from rllm_core.types import SamplingParams, Task
from rllm_devkit.scripted import Script, ScriptedEngine

_spec = importlib.util.spec_from_file_location("openenv_server", Path(__file__).with_name("openenv_server.py"))
assert _spec is not None
assert _spec.loader is not None
openenv_server = sys.modules.setdefault("openenv_server", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(openenv_server)

PARAMS = SamplingParams(max_response_tokens=64)
LAKE = {"left": 0, "down": 1, "right": 2, "up": 3}
GRID = {action.name: int(action) for action in minigrid.core.actions.Actions}
# What the packages' documentation calls the actions, and numbers where it has no names.
GYMNASIUM = {
    "FrozenLake-v1": LAKE,
    "Blackjack-v1": {"stick": 0, "hit": 1},
    "CartPole-v1": {"left": 0, "right": 1},
    "Taxi-v4": {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5},
    "BabyAI-GoToRedBallNoDists-v0": GRID,
    "MiniGrid-Empty-Random-5x5-v0": GRID,
}


def engine_with(answer):
    """An engine whose every answer is what a function returns."""

    class Answers(Script):
        def __getattribute__(self, name):
            return answer() if name == "good" else super().__getattribute__(name)

    return ScriptedEngine(script=Answers(), skill=1.0)


def played(workflow, task, answer):
    return asyncio.run(workflow.run(task, TITOCompleter(engine_with(answer), sampling_params=PARAMS)))


def rewards_of_gymnasium(name, seed, actions):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment = gymnasium.make(name)
        environment.reset(seed=seed)
        return [float(environment.step(action)[1]) for action in actions]


@pytest.mark.parametrize("games", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_rewards_of_gymnasium(games):
    """More than 1,000 answers of 20 games of each environment."""
    rng, answers = random.Random(0), 0
    seen = set()
    for name, actions in GYMNASIUM.items():
        workflow = GymnasiumWorkflow(GymnasiumConfig(environment=name, instructions=False))
        spoken = [*actions, *(action.upper() for action in actions)] * 8 + ["jump"]
        for number in range(games):
            task = Task(task_id=f"{number}", data={"seed": number})
            [trajectory] = played(workflow, task, lambda spoken=spoken: rng.choice(spoken)).trajectories
            said = [step.text.lower() for step in trajectory.steps]
            given = [step.reward for step in trajectory.steps]
            if said[-1] == "jump":
                assert given.pop() == NO_ACTION
            assert given == rewards_of_gymnasium(
                name, task.data["seed"], [actions[text] for text in said[: len(given)]]
            )
            answers += len(given)
            seen |= set(given)
    assert answers > 50 * games
    assert {-10.0, -1.0, 0.0, 1.0} <= seen


class Recorded(Game):
    """A game that keeps the moves of all its players."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.moves = []

    def act(self, action):
        self.moves.append(action)
        return super().act(action)


class Observed(TextArenaWorkflow):
    """Keeps its games, so that the scripted model can ask for legal moves."""

    def made(self, seed):
        config = self.config
        self.game = Recorded(config.environment, self.players, seed, config.options)
        return self.game


def rewards_of_textarena(name, players, seed, moves):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import textarena

        environment = textarena.make(name)
        environment.reset(num_players=players, seed=seed)
        for move in moves:
            environment.get_observation()
            environment.step(action=move)
        return environment.close()[0]


TEXTARENA = ["TicTacToe-v0", "KuhnPoker-v0", "LiarsDice-v0-small", "Nim-v0"]


@pytest.mark.parametrize("games", [5, pytest.param(250, marks=pytest.mark.slow)])
def test_rewards_of_textarena(games):
    """One reward for each of 1,000 games, after all of their moves."""
    rng, seen = random.Random(0), set()
    for name in TEXTARENA:
        workflow = Observed(TextArenaConfig(environment=name))
        for number in range(games):
            task = workflow.tasks("train")[number]
            [trajectory] = played(workflow, task, lambda workflow=workflow: workflow.game.legal_move(rng)).trajectories
            own = rewards_of_textarena(name, workflow.players, task.data["seed"], workflow.game.moves)
            assert workflow.game.is_over
            assert trajectory.reward == own[task.data["seat"]]
            seen.add(trajectory.reward)
    assert {-1.0, 1.0} <= seen


def test_rewards_of_openenv():
    behavior = openenv_server.Behavior()
    rng = random.Random(0)

    async def rewards():
        async with openenv_server.server(behavior) as url:
            workflow = OpenEnvWorkflow(OpenEnvConfig(url=url, action_field="take"))
            await workflow.open()
            tasks, given = workflow.tasks("train"), []
            while len(given) < 1000:
                completer = TITOCompleter(engine_with(lambda: rng.choice("123")), sampling_params=PARAMS)
                episode = await workflow.run(tasks[len(given) % len(tasks)], completer)
                given += [step.reward for step in episode.trajectories[0].steps]
            return given

    given = asyncio.run(rewards())
    assert given == behavior.rewards
    assert set(given) == {0.0, 1.0}
