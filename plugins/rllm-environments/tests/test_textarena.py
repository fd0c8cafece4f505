"""Workflow ``textarena`` with the real games."""

from __future__ import annotations

import asyncio
import random
import re
from itertools import islice

import pytest
from rllm_environments.textarena.audit import audits
from rllm_environments.textarena.game import Game, NoLegalMove
from rllm_environments.textarena.names import AUDIT_FILES, variants
from rllm_environments.textarena.workflow import LOST, TextArenaConfig, TextArenaWorkflow

from rllm_core.engine import TITOCompleter, derive_seed
from rllm_core.errors import ConfigError
from rllm_core.types import SamplingParams, TerminationReason
from rllm_devkit.checks.workflows import check_workflow
from rllm_devkit.scripted import Script, ScriptedEngine

PARAMS = SamplingParams(max_response_tokens=64)


def workflow_of(**settings):
    return TextArenaWorkflow(TextArenaConfig(**settings))


class Observed(TextArenaWorkflow):
    """Keeps its games, so that the scripted model can ask for legal moves."""

    game: Game

    def made(self, seed):
        self.game = super().made(seed)
        return self.game


def played(workflow, answer, number=0, seed=0):
    """Plays one game; ``answer()`` gives the model's answers."""

    class Answers(Script):
        def __getattribute__(self, name):
            return answer() if name == "good" else super().__getattribute__(name)

    completer = TITOCompleter(ScriptedEngine(script=Answers(), skill=1.0), sampling_params=PARAMS, seed=seed)
    return asyncio.run(workflow.run(workflow.tasks("train")[number], completer))


def legal(workflow, seed=0):
    rng = random.Random(seed)
    return lambda: workflow.game.legal_move(rng)


@pytest.mark.parametrize("number", [0, 1])
def test_a_legal_game_against_a_scripted_player_has_the_rewards_of_the_game(number):
    workflow = Observed(TextArenaConfig())
    episode = played(workflow, legal(workflow), number)
    seat = workflow.tasks("train")[number].data["seat"]
    assert seat == number
    assert workflow.game.is_over
    assert episode.trajectories[0].reward == workflow.game.rewards()[seat]
    assert episode.metrics["illegal_moves"] == episode.metrics["forfeits"] == 0


def test_only_what_is_new_is_appended():
    workflow = Observed(TextArenaConfig())
    episode = played(workflow, legal(workflow))
    steps = episode.trajectories[0].steps
    seen = [step.messages[-1]["content"] for step in steps]
    assert len(seen) > 2
    assert "Your goal is to win" in seen[0]
    assert not any("Your goal is to win" in text for text in seen[1:])
    assert all(text.count("Current Board") == 1 for text in seen)
    assert len({step.segment for step in steps}) == 1


def test_whoever_forfeits_loses():
    """Of a forfeited GuessTheNumber, the game itself still pays a part."""
    episode = played(workflow_of(environment="GuessTheNumber-v0"), lambda: "no number")
    assert episode.trajectories[0].reward == LOST
    assert episode.metrics["forfeits"] == 1
    assert episode.metrics["illegal_moves"] == 2
    assert not episode.is_correct


def test_the_forfeit_of_an_opponent_is_no_reward():
    workflow = Observed(TextArenaConfig(opponents="self"))
    rng = random.Random(0)
    episode = played(workflow, lambda: workflow.game.legal_move(rng) if workflow.game.player == 0 else "nothing")
    rewards = {trajectory.role: trajectory.reward for trajectory in episode.trajectories}
    assert workflow.game.rewards() == {0: 1.0, 1: -1.0}
    assert rewards == {"player0": 0.0, "player1": LOST}
    assert episode.metrics["forfeits"] == 1


def test_self_play_has_a_trajectory_for_each_seat():
    workflow = Observed(TextArenaConfig(opponents="self"))
    episode = played(workflow, legal(workflow))
    assert [trajectory.role for trajectory in episode.trajectories] == ["player0", "player1"]
    assert {trajectory.reward for trajectory in episode.trajectories} in ({1.0, -1.0}, {0.0})
    assert episode.is_correct is None


def test_a_truncated_answer_loses():
    workflow = workflow_of()
    engine = ScriptedEngine(script=Script(good="[4]" * 40), skill=1.0)
    episode = asyncio.run(workflow.run(workflow.tasks("train")[0], TITOCompleter(engine, sampling_params=PARAMS)))
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_TOKENS
    assert episode.trajectories[0].reward == LOST


def test_a_game_without_a_result_has_no_winner():
    workflow = Observed(TextArenaConfig(max_turns=2))
    episode = played(workflow, legal(workflow))
    assert episode.termination_reason is TerminationReason.MAX_TURNS
    assert episode.trajectories[0].reward == 0
    assert episode.metrics["not_lost"] == 0


def test_scripted_players_never_make_an_illegal_move():
    for seed in range(20):
        game, rng = Game("TicTacToe-v0", 2, seed), random.Random(seed)
        while not game.is_over:
            game.seen()
            assert game.act(game.legal_move(rng))
        assert not game.forfeited


def test_a_player_without_a_legal_move_raises(monkeypatch):
    game = Game("TicTacToe-v0", 2, 0)
    game.seen()
    monkeypatch.setattr(Game, "is_legal", lambda self, action: False)
    with pytest.raises(NoLegalMove, match="player 0"):
        game.legal_move(random.Random(0))


def test_trying_a_move_changes_nothing():
    one, other = (Game("KuhnPoker-v0", 2, 5) for _ in range(2))
    for game in (one, other):
        game.seen()
    state = random.getstate()
    for move in ("[bet]", "[check]", "nonsense"):
        one.is_legal(move)
    assert random.getstate() == state
    for game in (one, other):
        game.act("[check]")
    assert one.seen() == other.seen()


def rollouts(workflow, at_once):
    """Plays 16 games, at once or one after the other; returns all that was seen, answered and paid."""
    script = Script(good="[check]", bad="[bet]", latency_seconds=lambda rng: rng.random() * 0.003)
    engine = ScriptedEngine(script=script, skill=0.5)

    async def one(number):
        completer = TITOCompleter(engine, sampling_params=PARAMS, seed=derive_seed(number))
        episode = await workflow.run(workflow.tasks("train")[number], completer)
        [trajectory] = episode.trajectories
        return trajectory.reward, [(step.messages[-1]["content"], step.text) for step in trajectory.steps]

    async def all_of_them():
        if at_once:
            return await asyncio.gather(*(one(number) for number in range(16)))
        return [await one(number) for number in range(16)]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("environment", ["KuhnPoker-v0", "LiarsDice-v0-small"])
def test_concurrent_rollouts_equal_the_same_one_after_the_other(environment):
    workflow = workflow_of(environment=environment)
    random.seed(1)
    alone = rollouts(workflow, at_once=False)
    random.seed(2)
    assert rollouts(workflow, at_once=True) == alone
    assert len({str(each) for each in alone}) > 8, "the games should differ"


def test_the_warm_start_draws_from_the_legal_moves():
    config = TextArenaConfig(view="actions", instructions=False)
    chats = list(islice(TextArenaWorkflow(config).warm_start(random.Random(0)), 200))
    again = list(islice(TextArenaWorkflow(config).warm_start(random.Random(0)), 200))
    assert chats == again
    firsts = [chat[1]["content"] for chat in chats]
    assert {firsts.count(f"[{cell}]") > 5 for cell in range(9)} == {True}
    for chat in chats:
        moves = [move for message in chat for move in re.findall(r"\[\d\]", message["content"])]
        assert len(set(moves)) == len(moves), "no cell is taken twice"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "TicTacToe"}, "did you mean .*TicTacToe-v0"),
        ({"environment": "TicTacToe-v0-raw"}, "without this ending"),
        ({"environment": "GuessWho-v0"}, "paid service"),
        ({"environment": "UsedCarNegotiation-v0"}, "does not ship"),
        ({"environment": "BabyAiText-v0"}, "library"),
        ({"players": 5}, "players"),
        ({"seat": 2}, "seats 0 to 1"),
        ({"environment": "GuessTheNumber-v0", "opponents": "self"}, "one player"),
        ({"environment": "CharacterConclave-v0"}, "fails in play"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as refused:
        workflow_of(**settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("environment", ["TicTacToe-v0", "ThreeCardMonte-v0", "LightsOut-v0"])
def test_contract(environment):
    config = TextArenaConfig(environment=environment, max_turns=12, train_tasks=20, validation_tasks=5)
    answers = [f"[{cell}]" for cell in range(9)]
    results = asyncio.run(check_workflow(lambda: TextArenaWorkflow(config), answers=answers, tasks_per_split=1))
    assert not [result for result in results if result.outcome == "failed"]


def test_the_audit_lists_enough_games():
    environments = AUDIT_FILES.read().environments
    legal_games = [name for name, found in environments.items() if found.get("played")]
    assert len(legal_games) >= 60
    assert len({name.split("-v")[0] for name in legal_games}) >= 25
    assert set(variants()) == set(environments)


SAMPLE = ["TicTacToe-v0", "KuhnPoker-v0", "GuessTheNumber-v0", "ConnectFour-v0", "ReverseTicTacToe-v0"]


@pytest.mark.parametrize("name", SAMPLE)
def test_the_audit_is_as_committed(name):
    assert dict(audits([name])) == {name: AUDIT_FILES.read().environments[name]}


@pytest.mark.slow
def test_the_whole_audit_is_as_committed():
    assert dict(audits([])) == AUDIT_FILES.read().environments
