"""Reasons why a TextArena game cannot be played here, each one line with what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_environments.textarena.game import Game, library

MAX_PLAYERS = 15
_OTHER_FORMS = ("-raw", "-train")

# Games whose construction or reset takes minutes, or never ends.
ENDLESS: Mapping[str, str] = {}


def names() -> list[str]:
    """Returns the ids of all installed games, without variants that only display the same game differently."""
    library()
    registration = importlib.import_module("textarena.envs.registration")
    return [name for name in registration.ENV_REGISTRY if not name.endswith(_OTHER_FORMS)]


def opened(name: str, players: int | None, seed: int, options: Mapping[str, Any]) -> tuple[Game, int]:
    """Starts a game with the given number of players, or the smallest possible; returns the game and that number.

    Raises:
        ConfigError: If the game cannot be played here.
    """
    known = names()
    if name.endswith(_OTHER_FORMS):
        raise ConfigError(f"textarena.environment: {name} is another view of a game; use the id without this ending")
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, 0.5)
        meant = f"did you mean {', '.join(near)}? " if near else ""
        raise ConfigError(
            f"textarena.environment: there is no game {name!r}; {meant}List them with rllm-core environments list "
            "textarena"
        )
    family = name.split("-v")[0]
    if family in ENDLESS:
        raise ConfigError(f"textarena.environment: {name} is refused: {ENDLESS[family]}")
    errors: list[Exception] = []
    for count in [players] if players is not None else range(1, MAX_PLAYERS + 1):
        try:
            return Game(name, count, seed, options), count
        except (Exception, SystemExit) as error:  # third-party game
            errors.append(error if isinstance(error, Exception) else RuntimeError(f"it exits: {error}"))
    raise ConfigError(f"textarena.environment: {name} is refused: {_cause(errors, players)}") from errors[0]


def _cause(errors: Sequence[Exception], players: int | None) -> str:
    of_setup = [error for error in errors if not isinstance(error, AssertionError)]
    error = of_setup[0] if of_setup else errors[-1]
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return "its code needs Python 3.12 or newer"
    if "nltk" in text.lower() or (isinstance(error, LookupError) and "corpora" in text):
        corpus = "averaged_perceptron_tagger_eng" if "tagger" in text else "words"
        return f"it needs data of nltk: python -m nltk.downloader {corpus}"
    if "API" in text and "key" in text.lower():
        return f"it asks a paid service: {text[:100]}"
    if isinstance(error, ModuleNotFoundError | ImportError):
        return f"it needs a library that TextArena does not install: {text[:100]}"
    if isinstance(error, FileNotFoundError):
        file = text.rpartition("textarena/envs/")[2].rstrip("'")
        return f"it needs a file that TextArena does not ship: {file[:100]}"
    if isinstance(error, AssertionError):
        return f"it does not allow {players} players: {text[:100]}; set textarena.players"
    return f"it cannot be made: {type(error).__name__}: {text[:120]}; see textarena.options"
