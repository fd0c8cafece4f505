"""One game of TextArena: its turns, each player's new observations, and the illegal moves."""

from __future__ import annotations

import copy
import importlib
import random
import re
from collections.abc import Mapping
from typing import Any, Literal

from rllm_core.errors import ConfigError
from rllm_environments.quiet import quiet
from rllm_environments.textarena.candidates import candidates, listed
from rllm_environments.textarena.randomness import OwnRandomness

INSTALL = "pip install 'rllm-environments[textarena]'"
View = Literal["new", "board", "actions"]

# Kinds of messages by view; "new" shows all.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "board": ("PROMPT", "GAME_BOARD", "GAME_ADMIN"),
    "actions": ("PROMPT", "PLAYER_ACTION", "GAME_ADMIN"),
}
TRIES = 400
KEPT_TEXTS = 8

_SAYS_ILLEGAL = re.compile(r"\b(invalid|illegal)\b", re.IGNORECASE)


def library() -> Any:
    """Imports TextArena.

    Raises:
        ConfigError: If TextArena is not installed.
    """
    try:
        with quiet():
            return importlib.import_module("textarena")
    except ModuleNotFoundError as error:
        raise ConfigError(f"workflow 'textarena' needs textarena, which is not installed: {INSTALL}") from error


class NoLegalMove(Exception):
    """No candidate move of a scripted player was legal, so the game cannot continue."""


class Game:
    """One game of TextArena.

    Args:
        name: Game id, such as ``TicTacToe-v0``.
        players: Number of players.
        seed: Seed of the game.
        options: Settings of the game that replace its registered ones.

    Attributes:
        forfeited: Players that lost by an illegal move.
        illegal_moves: Number of illegal moves per player, including those that the game let pass.
    """

    def __init__(self, name: str, players: int, seed: int, options: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._randomness = OwnRandomness(seed)
        with self._randomness.used(), quiet():
            self._env = library().make(name, **(options or {}))
            self._env.reset(num_players=players, seed=seed)
        self.is_over = False
        self.forfeited: set[int] = set()
        self.illegal_moves = dict.fromkeys(range(players), 0)
        self._texts: dict[int, list[str]] = {}

    @property
    def player(self) -> int:
        """The player whose turn it is."""
        return int(self._base.state.current_player_id)

    @property
    def _base(self) -> Any:
        env = self._env
        while hasattr(env, "env"):
            env = env.env
        return env

    def seen(self, *, with_rules: bool = True, view: View = "new") -> str:
        """Returns the text that the current player has not seen yet.

        Args:
            with_rules: Whether to include the rules, which are shown only once.
            view: Everything new, only the newest board, or only the other players' moves; the last two always include
                the game's messages about illegal moves.
        """
        with self._randomness.used(), quiet():
            player, new = self._base.get_observation()
        roles = self._base.state.role_mapping
        kinds = [getattr(kind, "name", str(kind)) for _, _, kind in new]
        last_board = max((at for at, kind in enumerate(kinds) if kind == "GAME_BOARD"), default=None)
        lines = []
        texts = self._texts.setdefault(player, [])
        for at, (sender, message, _) in enumerate(new):
            kind = kinds[at]
            is_own = sender == player and kind == "PLAYER_ACTION"
            is_old_board = kind == "GAME_BOARD" and at != last_board
            if is_own or is_old_board:
                continue
            texts.append(message)
            if kind == "PROMPT" and not with_rules:
                continue
            if kind not in SHOWN.get(view, (kind,)):
                continue
            name = "GAME" if sender == -1 else roles.get(sender, f"Player {sender}")
            lines.append(f"[{name}] {message}" if view == "new" else message)
        del texts[1:-KEPT_TEXTS]
        return "\n".join(lines)

    def act(self, action: str) -> bool:
        """Makes a move for the current player, and returns whether the game accepted it as legal."""
        player = self.player
        with self._randomness.used(), quiet():
            is_legal = _step(self._env, self._base.state, action)
        state = self._base.state
        self.is_over = bool(state.done)
        if not is_legal:
            self.illegal_moves[player] += 1
            if self.is_over or state.game_info[player]["invalid_move"]:
                self.forfeited.add(player)
        return is_legal

    def rewards(self) -> dict[int, float]:
        """Returns the final rewards by player; players without a reward have 0."""
        found = self._base.close()[0] or {}
        return {player: float(found.get(player, 0.0)) for player in self.illegal_moves}

    def reason(self) -> str:
        """Returns the game's own text on how it ended."""
        return str(self._base.state.game_info.get(0, {}).get("reason", ""))

    def legal_move(self, rng: random.Random) -> str:
        """Returns a random legal move of the current player; call `seen` first.

        Moves that the game lists are equally likely. Without a list, it draws from the forms of moves that the game has
        named, and tries them on a copy.

        Raises:
            NoLegalMove: If no legal move was found.
        """
        texts = self._texts.get(self.player, [])
        named = listed(texts)
        rng.shuffle(named)
        for move in named:
            if self.is_legal(move):
                return move
        tried = set(named)
        for move in candidates(texts, rng, TRIES):
            if move not in tried and self.is_legal(move):
                return move
            tried.add(move)
        raise NoLegalMove(f"{self.name}: no legal move of player {self.player} was found in {len(tried)} candidates")

    def is_legal(self, action: str) -> bool:
        """Whether the game accepts a move, tried on a copy."""
        with self._randomness.tried(), quiet():
            env = copy.deepcopy(self._env)
            base = env
            while hasattr(base, "env"):
                base = base.env
            return _step(env, base.state, action)


def _step(env: Any, state: Any, action: str) -> bool:
    """Makes a move, and returns whether the game accepted it without reporting an illegal move."""
    player = int(state.current_player_id)
    errors, told = getattr(state, "error_count", 0), len(state.logs)
    env.step(action=action)
    state = env.state
    said = [message for sender, message in state.logs[told:] if sender == -1]
    if not all(isinstance(message, str) for _, message in state.logs[told:]):
        raise TypeError("it writes observations with their fields in the wrong order")
    return not (
        getattr(state, "error_count", 0) > errors
        or state.game_info[player]["invalid_move"]
        or any(map(_SAYS_ILLEGAL.search, said))
    )
