"""Workflow ``gymnasium`` with the real environments."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import Counter
from itertools import islice

import gymnasium
import numpy
import pytest
from rllm_environments.gymnasium_text.audit import audits
from rllm_environments.gymnasium_text.environment import TextEnvironment, newest_of
from rllm_environments.gymnasium_text.names import AUDIT_FILES, variants
from rllm_environments.gymnasium_text.observations import text_of
from rllm_environments.gymnasium_text.workflow import GymnasiumConfig, GymnasiumWorkflow

from rllm_core.engine import TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.types import SamplingParams, TerminationReason
from rllm_devkit.checks.workflows import check_workflow
from rllm_devkit.scripted import Script, ScriptedEngine

FROZEN = {"environment": "FrozenLake-v1", "options": {"is_slippery": False}}
RED_BALL = "BabyAI-GoToRedBallNoDists-v0"
SMALL_ROOM = {
    "environment": "BabyAI-GoToRedBall-v0",
    "options": {"room_size": 5, "num_dists": 0, "max_steps": 8},
    "view": "compact",
    "max_turns": 8,
    "instructions": False,
}

SEEN_AT_FIRST = [
    "use the key to open the door and then get to the goal",
    "facing west",
    "wall 1 ahead, 1 left, 3 right",
    "yellow key 1 right",
]
GRID = [
    "use the key to open the door and then get to the goal",
    "facing west",
    *["?? ?? ?? ?? ?? ?? ??"] * 5,
    "?? ?? ## ## ## ## ##",
    "?? ?? ## .. Ky .. ##",
]
SEEN_WITH_KEY = [
    "facing north",
    "carrying yellow key",
    "wall 3 ahead, 1 left, 1 right",
    "locked yellow door 2 ahead 1 right",
]
SEEN_IN_ROOM = ["OrFRR", "# OrRR", "OrFF", "# OrRR", "#"]


def workflow_of(**settings):
    return GymnasiumWorkflow(GymnasiumConfig(**settings))


def played(workflow, answers, task=None):
    """Plays one game with the given answers, one after the other."""
    given = iter(answers)

    class Answers(Script):
        def __getattribute__(self, name):
            return next(given) if name == "good" else super().__getattribute__(name)

    params = SamplingParams(max_response_tokens=200)
    completer = TITOCompleter(ScriptedEngine(script=Answers(), skill=1.0), sampling_params=params)
    return asyncio.run(workflow.run(task or workflow.tasks("train")[0], completer))


def test_the_shortest_way_over_the_lake_is_solved():
    way = ["down", "down", "right", "right", "down", "right"]
    episode = played(workflow_of(**FROZEN), way)
    steps = episode.trajectories[0].steps
    assert episode.is_correct
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert [step.messages[-1]["content"] for step in steps][1:] == ["4", "8", "9", "10", "14"]
    assert {step.segment for step in steps} == {steps[0].segment}


@pytest.mark.parametrize("answer", ["sideways", "", "0", "down right", "<answer>fly</answer> down"])
def test_an_answer_that_is_no_action_ends_the_rollout(answer):
    episode = played(workflow_of(**FROZEN), ["down", answer])
    assert episode.trajectories[0].total_reward == -1
    assert episode.metrics == {"turns": 2.0, "no_action": 1.0}
    assert not episode.is_correct


def test_the_action_may_be_in_tags():
    episode = played(workflow_of(**FROZEN, max_turns=2), ["To the goal: <answer>Down</answer>", "DOWN "])
    assert episode.termination_reason is TerminationReason.MAX_TURNS
    assert episode.metrics["no_action"] == 0


def test_the_text_of_minigrid():
    """A snapshot: any change needs another `TEXT_VERSION`."""
    environment = TextEnvironment("MiniGrid-DoorKey-5x5-v0")
    assert environment.reset(0).splitlines() == SEEN_AT_FIRST
    assert TextEnvironment("MiniGrid-DoorKey-5x5-v0", view="grid").reset(0).splitlines() == GRID
    compact = TextEnvironment("MiniGrid-DoorKey-5x5-v0", view="compact").reset(0).splitlines()
    assert compact == [GRID[0], "# KyR"]


def test_carried_objects_and_distances():
    environment = TextEnvironment("MiniGrid-DoorKey-5x5-v0")
    environment.reset(0)
    environment.act("right")
    assert environment.act("pickup").text.splitlines() == SEEN_WITH_KEY
    environment.view = "compact"
    assert environment.act("left").text == "# +Ky"
    assert environment.act("right").text == "+Ky XyFFR"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [("Blackjack-v1", r"\d+ \d+ [01]"), ("Taxi-v4", r"\d+"), ("CartPole-v1", r"(-?[\d.e-]+ ){3}-?[\d.e-]+")],
)
def test_the_text_of_discrete_and_small_spaces(environment, expected):
    assert re.fullmatch(expected, TextEnvironment(environment).reset(0))


def test_integers_are_shown_in_full():
    numbers = numpy.array([1234, -100_001])
    assert text_of(gymnasium.spaces.Box(-200_000, 200_000, (2,), numpy.int64), numbers) == "1234 -100001"
    assert text_of(gymnasium.spaces.MultiDiscrete([5000, 10]), numpy.array([4096, 3])) == "4096 3"
    assert text_of(gymnasium.spaces.Box(-5000, 5000, (3,)), numpy.array([-0.0, 0.12345, 1234.5])) == "0 0.123 1.23e+03"


def test_the_compact_view_of_a_room_with_a_ball():
    environment = workflow_of(**SMALL_ROOM).made()
    assert environment.reset(0) == "go to the red ball\nOrFFL"
    assert [environment.act(action).text for action in ("left", "forward", "right", "left", "left")] == SEEN_IN_ROOM


@pytest.mark.parametrize("view", ["objects", "grid", "compact"])
def test_instructions_explain_the_view(view):
    workflow = workflow_of(environment=RED_BALL, view=view)
    rules = workflow.made().instructions()
    assert {"objects": "with distances in cells", "grid": "at the bottom center", "compact": "OrFFL"}[view] in rules


def test_equal_seeds_start_equal_games():
    one, other = TextEnvironment(RED_BALL), TextEnvironment(RED_BALL)
    assert [one.reset(seed) for seed in range(8)] == [other.reset(seed) for seed in range(8)]


def test_no_held_out_game_starts_like_a_training_game():
    workflow = workflow_of(environment=RED_BALL)
    assert workflow.splits.held_out == "starts"
    environment = workflow.made()
    starts = {
        split: {environment.start_of(workflow.tasks(split)[number].data["seed"]) for number in range(60)}
        for split in ("train", "validation")
    }
    assert len(starts["validation"]) > 30
    assert not starts["train"] & starts["validation"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [("FrozenLake-v1", "nothing"), ("Blackjack-v1", "seeds"), ("MiniGrid-Empty-Random-5x5-v0", "starts")],
)
def test_what_is_held_out(environment, expected):
    assert workflow_of(environment=environment).splits.held_out == expected


def test_the_warm_start_draws_from_all_actions_of_training_games():
    config = GymnasiumConfig(environment=RED_BALL, max_turns=5, instructions=False)
    chats = list(islice(GymnasiumWorkflow(config).warm_start(random.Random(0)), 60))
    assert chats == list(islice(GymnasiumWorkflow(config).warm_start(random.Random(0)), 60))
    actions = [message["content"] for chat in chats for message in chat if message["role"] == "assistant"]
    assert {actions.count(action) > 20 for action in TextEnvironment(RED_BALL).actions} == {True}


def test_a_habit_of_the_warm_start_belongs_to_an_observation():
    def actions_by_observation(habit):
        workflow, found = workflow_of(**SMALL_ROOM, warm_start_habit=habit), {}
        for chat in islice(workflow.warm_start(random.Random(0)), 300):
            for asked, answered in zip(chat[::2], chat[1::2], strict=True):
                found.setdefault(asked["content"].splitlines()[-1], []).append(answered["content"])
        often = {text: Counter(actions) for text, actions in found.items() if len(actions) >= 50}
        assert len(often) >= 8
        return often

    def likeliest(counts):
        action, count = counts.most_common(1)[0]
        return action, count / counts.total()

    always = actions_by_observation(1.0)
    assert {len(counts) for counts in always.values()} == {1}
    assert len({likeliest(counts)[0] for counts in always.values()}) >= 3
    assert all(0.4 < likeliest(counts)[1] < 0.75 for counts in actions_by_observation(0.5).values())
    assert all(likeliest(counts)[1] < 0.4 for counts in actions_by_observation(0.0).values())


@pytest.mark.parametrize(("turns", "longest"), [(None, 8), (2, 2), (50, 8)])
def test_games_of_the_warm_start_may_be_shorter(turns, longest):
    workflow = workflow_of(**SMALL_ROOM, warm_start_turns=turns)
    lengths = {len(chat) // 2 for chat in islice(workflow.warm_start(random.Random(0)), 60)}
    assert max(lengths) == longest


@pytest.mark.slow
def test_random_play_rarely_finds_the_ball_of_the_example():
    workflow = workflow_of(**SMALL_ROOM)
    environment, rng, solved = workflow.made(), random.Random(0), 0
    for seed in range(1000):
        environment.reset(seed)
        while not (shown := environment.act(rng.choice(environment.actions))).is_over:
            pass
        solved += shown.reward > 0
    assert 50 < solved < 200
    starts = {
        split: {environment.start_of(workflow.tasks(split)[number].data["seed"]) for number in range(count)}
        for split, count in (("train", 1500), ("validation", 250))
    }
    assert not starts["train"] & starts["validation"]
    assert (len(starts["train"]), len(starts["validation"])) == (169, 23)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPole-v0", "out of date; use CartPole-v1"),
        ("Ant-v5", "MuJoCo"),
        ("LunarLander-v3", "Box2D"),
        ("phys2d/CartPole-v1", "jax"),
        ("GymV26Environment-v0", "old gym"),
        ("Pendulum-v1", "actions are of kind Box"),
        ("MiniGrid-WFC-MazeSimple-v0", "imageio"),
        ("FrozenLake", "did you mean .*FrozenLake-v1"),
    ],
)
def test_what_has_no_text_form_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError, match=message) as refused:
        workflow_of(environment=name)
    assert "\n" not in str(refused.value)


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match=r"gymnasium\.options"):
        workflow_of(environment="FrozenLake-v1", options={"no_such_option": 1})


class Echo(gymnasium.Env):
    """An environment of one's own, with text on both sides."""

    observation_space = gymnasium.spaces.Text(max_length=20)
    action_space = gymnasium.spaces.Text(max_length=20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = self.np_random.choice(["red", "green", "blue"])
        return str(self.word), {}

    def step(self, action):
        return "", float(action == self.word), True, False, {}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda self, action: ("", 1.0, True, {}), "ValueError: .*expected 5"),
        (lambda self, action: ("", numpy.array([1.0]), True, False, {}), "TypeError"),
        (lambda self, action: ("", math.nan, True, False, {}), "Bad-v0 returned the reward nan"),
        (lambda self, action: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_an_environment_whose_step_is_unusable_is_refused(step, message):
    gymnasium.register("Bad-v0", entry_point=type("Bad", (Echo,), {"step": step}), disable_env_checker=True)
    try:
        with pytest.raises(ConfigError, match=f"Bad-v0 is refused: it cannot be stepped: .*{message}"):
            workflow_of(environment="Bad-v0")
    finally:
        del gymnasium.registry["Bad-v0"]


def test_a_reward_that_is_no_number_names_the_environment_and_the_action():
    class Late(Echo):
        def step(self, action):
            return "", math.inf if action == "late" else 0.0, False, False, {}

    gymnasium.register("Late-v0", entry_point=Late)
    try:
        with pytest.raises(ValueError, match="Late-v0 returned the reward inf for action 'late'"):
            played(workflow_of(environment="Late-v0"), ["early", "late"])
    finally:
        del gymnasium.registry["Late-v0"]


def test_an_observation_of_another_kind_names_the_environment_and_the_observation():
    class Loose(Echo):
        observation_space = gymnasium.spaces.Box(0, 1, (2,))

        def reset(self, *, seed=None, options=None):
            return numpy.zeros(2, numpy.float32), {}

        def step(self, action):
            return "nothing", 0.0, False, False, {}

    gymnasium.register("Loose-v0", entry_point=Loose, disable_env_checker=True)
    try:
        with pytest.raises(ConfigError, match="Loose-v0 returned the observation 'nothing'"):
            workflow_of(environment="Loose-v0")
    finally:
        del gymnasium.registry["Loose-v0"]


def test_an_environment_of_ones_own_with_texts():
    gymnasium.register("Echo-v0", entry_point=Echo)
    try:
        workflow = workflow_of(environment="Echo-v0", instructions=False)
        word = TextEnvironment("Echo-v0").reset(0)
        assert played(workflow, [word]).is_correct
        assert not played(workflow, ["grey"]).is_correct
    finally:
        del gymnasium.registry["Echo-v0"]


@pytest.mark.parametrize("environment", ["FrozenLake-v1", RED_BALL, "CartPole-v1", "Blackjack-v1"])
def test_contract(environment):
    config = GymnasiumConfig(environment=environment, max_turns=12, train_tasks=20, validation_tasks=5)
    answers = TextEnvironment(environment).actions
    results = asyncio.run(check_workflow(lambda: GymnasiumWorkflow(config), answers=answers, tasks_per_split=1))
    assert not [result for result in results if result.outcome == "failed"]


def test_the_audit_lists_every_newest_environment_and_enough_were_played():
    environments = AUDIT_FILES.read().environments
    registered = list(gymnasium.registry)
    assert set(environments) == {newest_of(registered, name) for name in registered} == set(variants())
    assert sum(found.get("played", False) for found in environments.values()) >= 170


SAMPLE = ["FrozenLake-v1", "Blackjack-v1", "MiniGrid-DoorKey-5x5-v0", "BabyAI-GoToObj-v0", "Ant-v5", "Pendulum-v1"]


@pytest.mark.parametrize("name", SAMPLE)
def test_the_audit_is_as_committed(name):
    assert dict(audits([name])) == {name: AUDIT_FILES.read().environments[name]}


@pytest.mark.slow
def test_the_whole_audit_is_as_committed():
    assert dict(audits([])) == AUDIT_FILES.read().environments
