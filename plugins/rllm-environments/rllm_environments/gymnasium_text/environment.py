"""One gymnasium environment with text observations and actions; rejects environments that have no text form."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.providers import resolve
from rllm_environments.gymnasium_text.observations import (
    LEGENDS,
    GridForm,
    is_minigrid,
    text_of,
    text_of_view,
    unreadable,
)
from rllm_environments.quiet import quiet

INSTALL = "pip install 'rllm-environments[gymnasium]'"

MINIGRID_ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")

# Keyed by id without version. In environments not listed here, an action is its number.
ACTION_NAMES: Mapping[str, tuple[str, ...]] = {
    "Acrobot": ("negative", "none", "positive"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
OBSERVATION_NOTES: Mapping[str, str] = {
    "Acrobot": "cosine and sine of both joint angles, and both angular velocities",
    "Blackjack": "your sum, the dealer's card, and whether you have a usable ace (1) or not (0)",
    "CartPole": "cart position, cart velocity, pole angle in radians, and angular velocity",
    "CliffWalking": "your cell on 4 rows of 12, which is row * 12 + column; the start is 36 and the goal 47, with a "
    "cliff between them",
    "CliffWalkingSlippery": "your cell on 4 rows of 12, which is row * 12 + column; the start is 36 and the goal 47, "
    "with a cliff between them, and you may slip to the side",
    "FrozenLake": "your cell, which is row * columns + column; the start is 0, the goal is the last cell, and holes "
    "end the game",
    "FrozenLake8x8": "your cell, which is row * 8 + column; the start is 0, the goal is 63, and holes end the game",
    "MountainCar": "position of the car from -1.2 to 0.6, where the goal is at 0.5, and its velocity",
    "Taxi": "((row * 5 + column) * 5 + passenger) * 4 + destination; passenger 4 is in the taxi, and places 0 to 3 are "
    "red (0, 0), green (0, 4), yellow (4, 0) and blue (4, 3)",
}

_LEGACY = re.compile(r"_raise_(mujoco_py|shimmy)_error")
_VERSION = re.compile(r"-v(\d+)$")
MAX_DISCRETE = 1000
STEP_FORM = "step must return (observation, reward, terminated, truncated, info), and not be async"


def family(name: str) -> str:
    """Returns an environment id without its version."""
    return _VERSION.sub("", name)


def library() -> Any:
    """Imports gymnasium, and registers MiniGrid and BabyAI if they are installed.

    Raises:
        ConfigError: If gymnasium is not installed.
    """
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        raise ConfigError(f"workflow 'gymnasium' needs gymnasium, which is not installed: {INSTALL}") from error
    with contextlib.suppress(ModuleNotFoundError), quiet():
        importlib.import_module("minigrid")
    return gymnasium


def newest_of(names: Sequence[str], name: str) -> str:
    """Returns the newest version of an id among ``names``."""
    versions = [other for other in names if family(other) == family(name)]
    return max(versions, key=lambda other: int(found[1]) if (found := _VERSION.search(other)) else -1, default=name)


@dataclass(frozen=True)
class ActionResult:
    """The result of an action."""

    text: str
    reward: float
    terminated: bool
    truncated: bool

    @property
    def is_over(self) -> bool:
        """Whether the game has ended."""
        return self.terminated or self.truncated


class TextEnvironment:
    """One environment with text observations and actions.

    Args:
        name: Environment id, such as ``FrozenLake-v1``.
        options: Arguments of ``gymnasium.make``.
        imports: Modules or files that register ids.
        view: Text form of MiniGrid's observations.

    Raises:
        ConfigError: If the environment is unknown, out of date, cannot be constructed, or has no text form.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        view: GridForm = "objects",
    ) -> None:
        self.name = name
        self.view = view
        self._env = _made(name, options or {}, imports)
        space = self._env.observation_space
        self.is_minigrid = is_minigrid(space)
        self.actions = _action_names(self._env, self.is_minigrid)
        self._by_name = {action.casefold(): number for number, action in enumerate(self.actions or ())}

    def reset(self, seed: int) -> str:
        """Starts the game for a seed, and returns the first observation."""
        with quiet():
            observation, _ = self._env.reset(seed=seed)
        text = self._text(observation)
        return f"{observation['mission']}\n{text}" if self.is_minigrid else text

    def is_legal(self, action: str) -> bool:
        """Whether a text is an action."""
        if self.actions is None:
            return bool(self._env.action_space.contains(action))
        return action.casefold() in self._by_name

    def act(self, action: str) -> ActionResult:
        """Takes a legal action, and returns its result."""
        space = self._env.action_space
        chosen = action if self.actions is None else int(space.start) + self._by_name[action.casefold()]
        with quiet():
            observation, reward, terminated, truncated, _ = self._env.step(chosen)
        if not math.isfinite(reward):
            raise ValueError(f"{self.name} returned the reward {reward} for action {action!r}; return a finite number")
        return ActionResult(self._text(observation), float(reward), bool(terminated), bool(truncated))

    def step(self, action: str) -> str | None:
        """Takes a legal action, and returns the next observation, or None at the end."""
        shown = self.act(action)
        return None if shown.is_over else shown.text

    def legal_actions(self, rng: random.Random) -> Sequence[str]:
        """Returns all actions, or a sample from a space of texts."""
        if self.actions is not None:
            return self.actions
        self._env.action_space.seed(rng.getrandbits(31))
        return [self._env.action_space.sample() for _ in range(4)]

    def start_of(self, seed: int) -> str:
        """Returns a key for a seed's start: the whole state where the environment can hash it."""
        text = self.reset(seed)
        state = getattr(self._env.unwrapped, "hash", None)
        return str(state()) if callable(state) else text

    def check_play(self) -> None:
        """Checks that a game can be started, and takes one action.

        Raises:
            ConfigError: If it cannot, for example because a library is missing, or ``step`` returns something else than
                gymnasium requires.
        """
        try:
            self.reset(0)
        except Exception as error:  # third-party environment
            raise _unusable(self.name, "reset", error) from error
        try:
            self.act(self.legal_actions(random.Random(0))[0])
        except Exception as error:  # third-party environment
            raise _unusable(self.name, "stepped", error, STEP_FORM) from error

    @property
    def has_state_hash(self) -> bool:
        """Whether equal states can be recognized."""
        return callable(getattr(self._env.unwrapped, "hash", None))

    @property
    def turn_limit(self) -> int | None:
        """The environment's own limit on the number of actions, or None."""
        limit = self._env.spec.max_episode_steps or getattr(self._env.unwrapped, "max_steps", None)
        return int(limit) if limit else None

    @property
    def solved_return(self) -> float | None:
        """The return at which the environment counts as solved, from its registration, or None."""
        threshold = self._env.spec.reward_threshold
        return None if threshold is None else float(threshold)

    def instructions(self) -> str:
        """Returns rules for a model that does not know the form of actions."""
        if self.is_minigrid:
            seen = LEGENDS[self.view]
        else:
            note = OBSERVATION_NOTES.get(family(self.name))
            seen = f"{note}." if note else "see the environment's documentation."
        actions = ", ".join(self.actions) if self.actions is not None else "any text"
        return (
            f"You act in the environment {self.name}, one action per turn, for the highest total reward.\n"
            f"Observation: {seen}\nActions: {actions}\n"
            "Answer with one action. If you write anything else, put the action into <answer> </answer> at the end."
        )

    def close(self) -> None:
        """Releases the resources of the environment."""
        self._env.close()

    def _text(self, observation: Any) -> str:
        if self.is_minigrid:
            return text_of_view(observation, self.view)
        try:
            return text_of(self._env.observation_space, observation)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.name} returned the observation {observation!r:.80}, which does not fit its observation_space "
                f"({type(error).__name__}: {error})"
            ) from error


def _made(name: str, options: Mapping[str, Any], imports: Sequence[str]) -> Any:
    gymnasium = library()
    for module in imports:
        try:
            resolve(module)
        except Exception as error:  # third-party module
            raise ConfigError(
                f"gymnasium.imports: {module!r} cannot be imported: {type(error).__name__}: {error}; name a file as "
                "./FILE.py, or a module of an installed package or of a folder in PYTHONPATH"
            ) from error
    known = list(gymnasium.registry)
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, 0.5)
        meant = f"did you mean {', '.join(near)}? " if near else ""
        raise ConfigError(
            f"gymnasium.environment: no environment {name!r} is registered; {meant}List them with rllm-core "
            "environments list gymnasium, or name the module that registers it in gymnasium.imports"
        )
    newest = newest_of(known, name)
    if newest != name:
        raise ConfigError(f"gymnasium.environment: {name} is out of date; use {newest}")
    refused = refusal(gymnasium.registry[name])
    if refused is not None:
        raise ConfigError(f"gymnasium.environment: {name} is refused: {refused}")
    try:
        with quiet():
            env = gymnasium.make(name, **options)
    except Exception as error:  # third-party environment
        raise _unusable(name, "made", error) from error
    why = unreadable(env.observation_space) or unplayable(env.action_space)
    if why is not None:
        env.close()
        raise ConfigError(f"gymnasium.environment: {name} is refused: {why}")
    return env


def _unusable(name: str, what: str, error: Exception, advice: str = "see gymnasium.options") -> ConfigError:
    text = " ".join(str(error).split())
    return ConfigError(
        f"gymnasium.environment: {name} is refused: it cannot be {what}: {type(error).__name__}: {text[:160]}; {advice}"
    )


def refusal(spec: Any) -> str | None:
    """Returns a requirement of a registered environment that this package does not install, or None."""
    entry = str(spec.entry_point)
    if "mujoco" in entry:
        return "it needs MuJoCo, and its actions are numbers of a continuous range; choose one with discrete actions"
    if "box2d" in entry:
        return "it needs Box2D, and shows numbers or images of a simulation; choose one without"
    if "phys2d" in entry or "tabular" in entry:
        return "it needs jax; choose the environment of the same name without phys2d/ or tabular/"
    if _LEGACY.search(entry):
        return "it needs the old gym and shimmy; choose one of gymnasium's own form"
    if entry.startswith("ale_py") or "atari" in entry.lower():
        return "it needs Atari games and shows images; choose one that shows symbols"
    return None


def unplayable(space: Any) -> str | None:
    """Returns the reason why actions of a space have no text form, or None if they have one."""
    kind = type(space).__name__
    if kind == "Text" or (kind == "Discrete" and int(space.n) <= MAX_DISCRETE):
        return None
    return f"its actions are of kind {kind}; only Discrete (at most {MAX_DISCRETE} actions) and Text have a text form"


def _action_names(env: Any, minigrid: bool) -> tuple[str, ...] | None:
    space = env.action_space
    if type(space).__name__ == "Text":
        return None
    names = MINIGRID_ACTIONS[: int(space.n)] if minigrid else ACTION_NAMES.get(family(env.spec.id), ())
    if len(names) == int(space.n):
        return names
    return tuple(str(int(space.start) + number) for number in range(int(space.n)))
