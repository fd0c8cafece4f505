"""Audits the games of TextArena.

The audit plays every game to its end with legal moves, and runs all checks of a workflow on it.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rllm_core.errors import ConfigError
from rllm_environments.legal_play import failed_checks, play
from rllm_environments.textarena.game import Game, NoLegalMove
from rllm_environments.textarena.refusals import names
from rllm_environments.textarena.workflow import FAILS_IN_PLAY, TextArenaConfig, TextArenaWorkflow

MAX_TURNS = 300
COMPARED_SEEDS = 4
SEED = 3
LIMIT_CPU_SECONDS = 10.0
CHECKED_TURNS = 6


class _TooSlow(BaseException):
    """The audit of one game has used up its CPU time. Not an `Exception`, because games catch those."""


class Observed(TextArenaWorkflow):
    """Exposes the current game, so that a scripted policy knows its legal moves."""

    game: Game

    def made(self, seed: int) -> Game:
        """See `TextArenaWorkflow.made`."""
        self.game = super().made(seed)
        return self.game

    def answer(self, rng: random.Random) -> str:
        """Returns a legal move for the current player."""
        return self.game.legal_move(rng)


def audits(variants: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the findings of the named games, or of all registered games."""
    for name in variants or sorted(names()):
        try:
            with _limited():
                found, moves = _audited(name)
        except _TooSlow:
            yield name, {"notes": [f"a game takes more than {LIMIT_CPU_SECONDS:.0f} CPU seconds"]}
            continue
        if found.get("played"):
            failed = _failed_checks(name, moves)
            found |= {"notes": failed + found["notes"]} | ({"played": False, "audited": False} if failed else {})
        yield name, found


def _failed_checks(name: str, moves: Sequence[str]) -> list[str]:
    config = TextArenaConfig(environment=name, max_turns=CHECKED_TURNS, train_tasks=2, validation_tasks=1)
    return failed_checks(lambda: TextArenaWorkflow(config, audited=True), moves)


def _audited(name: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the findings, and the moves of the game that was played."""
    config = TextArenaConfig(environment=name, max_turns=MAX_TURNS, seat=0, train_tasks=8)
    try:
        workflow = Observed(config, audited=True)
    except ConfigError as error:
        return {"refused": str(error).partition(" is refused: ")[2] or str(error)}, []
    found: dict[str, Any] = {"players": workflow.players}
    try:
        found["held_out"] = _held_out(workflow)
        first, again = (_played_alone(workflow) for _ in range(2))
        if first.game.is_over:
            episode = play(workflow, workflow.tasks("train")[SEED], workflow.answer)
            found["turns"] = str(int(episode.metrics["turns"]))
    except NoLegalMove as error:
        return {**found, "notes": [f"not played: {str(error).partition(': ')[2]}"]}, []
    except Exception as error:  # third-party game
        text = " ".join(str(error).split())
        return {**found, "refused": f"{FAILS_IN_PLAY}: {type(error).__name__}: {text[:120]}"}, []
    notes = []
    if not first.game.is_over:
        notes.append(f"not played: no end within {MAX_TURNS} random moves")
    elif sum(first.game.illegal_moves.values()) or sum(workflow.game.illegal_moves.values()):
        notes.append("not played: a move was illegal that was legal on a copy")
    elif not workflow.game.is_over:
        notes.append("not played: no end through the workflow")
    played = not notes
    is_repeatable = first.texts == again.texts
    if not is_repeatable:
        notes.append("the same seed and moves do not give the same game")
    if found["held_out"] == "nothing":
        notes.append("every seed starts alike, so nothing is held out")
    return {**found, "played": played, "audited": played and is_repeatable, "notes": notes}, first.moves


@dataclass(frozen=True)
class _Played:
    game: Game
    texts: list[str]
    moves: list[str]


def _played_alone(workflow: Observed) -> _Played:
    """Plays one game without a workflow, which is fast enough for games that never end."""
    rng = random.Random(SEED)
    game = Game(workflow.config.environment, workflow.players, SEED)
    texts: list[str] = []
    moves: list[str] = []
    while not game.is_over and len(texts) < MAX_TURNS:
        texts.append(game.seen())
        moves.append(game.legal_move(rng))
        game.act(moves[-1])
    return _Played(game, texts, moves)


def _held_out(workflow: TextArenaWorkflow) -> str:
    starts = {workflow.made(seed).seen() for seed in range(COMPARED_SEEDS)}
    return "nothing" if len(starts) == 1 else "seeds"


@contextmanager
def _limited() -> Iterator[None]:
    """Raises `_TooSlow` in the main thread after `LIMIT_CPU_SECONDS`."""

    def stop(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
