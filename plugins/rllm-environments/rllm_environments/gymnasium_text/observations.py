"""Observations as text. Any change to a text changes `TEXT_VERSION`: results compare only within one version.

Version 2:

- ``Discrete``: the number. ``MultiDiscrete``, ``MultiBinary`` and small ``Box``: numbers separated by spaces, integers
  in full and others with three significant digits. ``Tuple``: the parts, separated by spaces. ``Text``: as it is.
  ``Dict``: ``key: value`` per line.
- MiniGrid and BabyAI, form ``objects``: the mission at the start; then, every turn, the agent's direction, what it
  carries, the nearest wall ahead and at its sides, and every other object it sees, nearest first, by its distance.
- MiniGrid and BabyAI, form ``grid``: the mission, the direction, and all cells of the view, of two characters each;
  the agent is at the bottom center and looks up. This form keeps everything that the environment shows.
- MiniGrid and BabyAI, form ``compact``: the mission at the start; then, every turn, words of letters on one line:
  ``#`` if a wall is in the next cell ahead, ``+`` and the cell that the agent carries, and each object it sees, nearest
  first: its cell as in form ``grid``, then the way to it, an ``F`` for each cell forward and an ``L`` or ``R`` for each
  to the side. ``-`` if there is none of these. It is a few tokens, and leaves out the direction and how far walls are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

TEXT_VERSION = 2
MAX_NUMBERS = 32

GridForm = Literal["objects", "grid", "compact"]

# MiniGrid's own encoding, by number.
OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
DOOR_STATES = ("open", "closed", "locked")
DIRECTIONS = ("east", "south", "west", "north")
COLORLESS = ("wall", "lava", "goal")

_NOTHING = tuple(OBJECTS.index(name) for name in ("unseen", "empty", "floor", "agent"))
_BACKGROUND = (*_NOTHING, OBJECTS.index("wall"))

OBJECT_LETTERS = "?.#,DKOBGL^"
COLOR_LETTERS = "rgbpy-"
DOOR_LETTERS = {"open": "_", "closed": "D", "locked": "X"}

_LETTERS = (
    "_ open door, D closed door, X locked door, K key, O ball, B box, G goal, L lava, followed by the color r g b p y "
    "-(grey)."
)
LEGENDS: Mapping[GridForm, str] = {
    "objects": "What you see, with distances in cells from you.",
    "grid": "Cells of two characters; you are at the bottom center and look up. ? unseen, . empty, # wall, , floor, "
    + _LETTERS,
    "compact": "# a wall in the next cell, + what you carry, and what you see, followed by the way to it: F for each "
    "cell forward, L or R for each to the side; OrFFL is a red ball 2 ahead and 1 left, and - means none of these. "
    "Cells: " + _LETTERS,
}


def is_minigrid(observation_space: Any) -> bool:
    """Whether observations are MiniGrid's: an encoded view, a direction and a mission."""
    spaces = getattr(observation_space, "spaces", None)
    return isinstance(spaces, Mapping) and {"image", "direction", "mission"} <= set(spaces)


def unreadable(space: Any) -> str | None:
    """Returns the reason why observations of a space have no text form, or None if they have one."""
    if is_minigrid(space):
        image = space.spaces["image"].shape
        return None if len(image) == 3 and image[2] == 3 and image[0] <= 19 else f"a view of {image}"
    kind = type(space).__name__
    if kind in ("Discrete", "Text"):
        return None
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        size = 1
        for length in space.shape:
            size *= length
        return None if size <= MAX_NUMBERS else f"{size} numbers, such as an image"
    if kind in ("Dict", "Tuple"):
        parts = space.spaces.values() if kind == "Dict" else space.spaces
        return next(filter(None, map(unreadable, parts)), None)
    return f"a space of kind {kind}"


def text_of(space: Any, observation: Any) -> str:
    """Returns an observation of a space other than MiniGrid's as text."""
    kind = type(space).__name__
    if kind == "Discrete":
        return str(int(observation))
    if kind == "Text":
        return str(observation)
    if kind == "Tuple":
        return " ".join(text_of(part, value) for part, value in zip(space.spaces, observation, strict=True))
    if kind == "Dict":
        return "\n".join(f"{key}: {text_of(part, observation[key])}" for key, part in space.spaces.items())
    values = observation.reshape(-1).tolist()
    return " ".join(str(int(value)) if isinstance(value, int) else f"{value + 0.0:.3g}" for value in values)


def text_of_view(observation: Mapping[str, Any], form: GridForm) -> str:
    """Returns MiniGrid's view as text, without the mission."""
    image = observation["image"]
    if form == "compact":
        return _compact(image)
    lines = [f"facing {DIRECTIONS[int(observation['direction'])]}"]
    return "\n".join(lines + (_objects(image) if form == "objects" else _grid(image)))


def _objects(image: Any) -> list[str]:
    """Returns the carried object, the walls next to the agent, and the visible objects; the agent looks up."""
    carried = _named(_carried(image))
    lines = [f"carrying {carried}"] if carried is not None else []
    walls = [f"{distance} {way}" for way, distance in _walls(image).items()]
    lines += [f"wall {', '.join(walls)}"] if walls else []
    return lines + [f"{_named(cell)} {_place(ahead, aside)}" for cell, ahead, aside in _in_view(image)]


def _compact(image: Any) -> str:
    """Returns an adjacent wall, the carried object and the visible objects as letters; the agent looks up."""
    words = ["#"] if _walls(image).get("ahead") == 1 else []
    carried = _carried(image)
    words += [f"+{_letters(carried)}"] if _named(carried) is not None else []
    for cell, ahead, aside in _in_view(image):
        words.append(_letters(cell) + "F" * ahead + ("L" if aside < 0 else "R") * abs(aside))
    return " ".join(words) or "-"


def _carried(image: Any) -> Any:
    """Returns the agent's own cell, which holds the carried object."""
    width, height, _ = image.shape
    return image[width // 2, height - 1]


def _walls(image: Any) -> dict[str, int]:
    """Returns the distances of the nearest visible walls, ahead and to the sides."""
    width, height, _ = image.shape
    center = width // 2
    ways = {
        "ahead": [(center, row) for row in range(height - 2, -1, -1)],
        "left": [(column, height - 1) for column in range(center - 1, -1, -1)],
        "right": [(column, height - 1) for column in range(center + 1, width)],
    }
    found = {
        way: next((at for at, cell in enumerate(cells, 1) if OBJECTS[image[cell][0]] == "wall"), None)
        for way, cells in ways.items()
    }
    return {way: distance for way, distance in found.items() if distance is not None}


def _in_view(image: Any) -> list[tuple[Any, int, int]]:
    """Returns visible objects other than walls, nearest first, with their distances ahead and to the side."""
    width, height, _ = image.shape
    found = []
    for column, cells in enumerate(image.tolist()):
        for row, cell in enumerate(cells):
            if cell[0] in _BACKGROUND:
                continue
            ahead, aside = height - 1 - row, column - width // 2
            if ahead or aside:
                found.append((ahead + abs(aside), aside, _named(cell), (cell, ahead, aside)))
    return [placed for *_, placed in sorted(found, key=lambda each: each[:3])]


def _place(ahead: int, aside: int) -> str:
    """Returns a cell's position relative to the agent: ``3 ahead``, ``2 ahead 1 left``."""
    sides = f"{abs(aside)} {'left' if aside < 0 else 'right'}" if aside else ""
    return f"{ahead} ahead {sides}".strip() if ahead else sides


def _named(cell: Any) -> str | None:
    """Returns the name of a cell's content, such as ``locked red door``, or None if the cell is empty."""
    kind, color, state = (int(part) for part in cell)
    if kind in _NOTHING:
        return None
    name = OBJECTS[kind]
    words = [] if name in COLORLESS else [COLORS[color]]
    return " ".join([*([DOOR_STATES[state]] if name == "door" else []), *words, name])


def _grid(image: Any) -> list[str]:
    width, height, _ = image.shape
    return [" ".join(_letters(image[column, row]) for column in range(width)) for row in range(height)]


def _letters(cell: Any) -> str:
    kind, color, state = (int(part) for part in cell)
    name = OBJECTS[kind]
    letter = DOOR_LETTERS[DOOR_STATES[state]] if name == "door" else OBJECT_LETTERS[kind]
    return letter + (COLOR_LETTERS[color] if name in ("door", "key", "ball", "box") else letter)
