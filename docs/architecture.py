"""Reads the core's imports, and draws its rooms into ``images/rooms.svg``.

Run ``make docs-reference``, or ``python docs/architecture.py`` for this picture only.

`ROOMS` is the only list of the rooms. ``tests/core/test_layers.py`` checks the imports against it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import diagrams

CORE = Path(__file__).parent.parent / "rllm_core"
PICTURE = diagrams.FOLDER / "rooms.svg"

Kind = Literal["module", "function", "types"]


@dataclass(frozen=True)
class Room:
    """Modules that belong together. They may import each other without circles, and all rooms listed before.

    Attributes:
        modules: Names of modules and packages in the core.
        summary: What is in it, for the picture.
    """

    name: str
    modules: tuple[str, ...]
    summary: str


ROOMS = (
    Room(
        "data types",
        (
            "version",
            "errors",
            "moved",
            "file_references",
            "model_files",
            "score",
            "seeds",
            "text",
            "messages",
            "tokens",
            "records",
            "returned_values",
            "media",
            "sampling",
            "step_differences",
            "termination",
            "types",
        ),
        "tokens, messages, steps, episodes",
    ),
    Room("parser", ("parser",), "messages to tokens and back"),
    Room("run file", ("run_file", "schedules", "config"), "keys, types, defaults, messages"),
    Room("hooks", ("events", "providers", "hookspecs", ""), "what a plugin provides and observes"),
    Room(
        "plugins",
        ("plugins",),
        "from package metadata to a class",
    ),
    Room(
        "contracts",
        (
            "limits",
            "costs",
            "scope",
            "engine",
            "backend",
            "sandbox",
            "services",
            "workflow",
            "memory",
            "third_party_calls",
            "observers",
            "tracker",
        ),
        "engine, backend, workflow, sandbox",
    ),
    Room("rollout hosts", ("hosts",), "where rollouts run; workers"),
    Room("algorithms", ("algorithms",), "pure functions on numpy"),
    Room("builtin", ("builtin",), "what the core ships as a plugin"),
    Room("distillation", ("distillation",), "scores of a teacher"),
    Room("assembly", ("assembly",), "from a run file to its parts"),
    Room("run folder", ("run_folder",), "files of a run, and who reads them"),
    Room("training", ("training",), "the loop"),
    Room("runs", ("runs",), "launching training, or an evaluation"),
    Room("cli", ("cli", "from_python", "__main__", "testing"), "the commands, and the same from Python"),
)
"""All rooms; each may import those before it."""


@dataclass(frozen=True)
class Import:
    """An import of one module of the core by another.

    Attributes:
        importer: Name of a module without ``rllm_core.``; "" is the package itself.
        imported: The same of the imported module.
        kind: ``function``: when a function runs; ``types``: for type checkers only; ``module``: otherwise.
    """

    importer: str
    imported: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def room_of(module: str) -> Room:
    """Returns the room of a module.

    Raises:
        LookupError: If it is in none.
    """
    for room in ROOMS:
        if module.partition(".")[0] in room.modules:
            return room
    raise LookupError(f"rllm_core.{module} is in no room; add it to ROOMS in docs/architecture.py")


def modules(core: Path = CORE) -> dict[str, Path]:
    """Maps the names of all modules to their files."""
    found = {}
    for path in sorted(core.rglob("*.py")):
        parts = path.relative_to(core).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(core: Path = CORE) -> list[Import]:
    """Returns all imports in the core, each once per importer and kind."""
    files = modules(core)
    found: dict[Import, None] = {}
    for importer, path in files.items():
        for node, kind in _import_statements(ast.parse(path.read_text(encoding="utf-8")), "module"):
            for name in _imported_names(node):
                package, _, module = name.partition(".")
                if package != core.name:
                    continue
                if module not in files:  # a name in a module
                    module = module.rpartition(".")[0]
                if module != importer:
                    found[Import(importer, module, kind)] = None
    return list(found)


def _import_statements(tree: ast.AST, kind: Kind) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, kind
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _import_statements(node, "function")
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _import_statements(node, "types")
        else:
            yield from _import_statements(node, kind)


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [prefix + alias.name for alias in node.names]


def drawing() -> diagrams.Drawing:
    """Draws the rooms from top to bottom, with an arc from each to those it imports; wider for more imports.

    Arcs on the left run back up.
    """
    order = [room.name for room in reversed(ROOMS)]
    counts = Counter((room_of(one.importer).name, room_of(one.imported).name) for one in imports())
    left, width, height, gap = 8, 24, 2.7, 0.9
    picture = diagrams.Drawing("Rooms of rllm_core and their imports", 52, len(order) * (height + gap) + 1)
    middle = {name: 1 + number * (height + gap) + height / 2 for number, name in enumerate(order)}
    for (importer, imported), count in sorted(counts.items()):
        rows = order.index(imported) - order.index(importer)
        if rows == 0:
            continue
        edge, bend = (left + width, 2.5 + 1.8 * rows) if rows > 0 else (left, -2.5 + 0.6 * rows)
        # Out of a box below its middle and into one above, so that arcs do not seem to go on.
        ends = (edge, middle[importer] + 0.5), (edge, middle[imported] - 0.5)
        picture.arc(*ends, bend=bend, weight=_weight(count))
    for room in ROOMS:
        y = middle[room.name] - height / 2
        picture.box(left, y, width, height, room.name, room.summary, style="strong")
    return picture


def _weight(count: int) -> float:
    """Returns the width of an arc, in few steps so that single imports rarely change the picture."""
    return next(weight for most, weight in ((2, 0.8), (8, 1.8), (20, 3.2), (count, 5.0)) if count <= most)


if __name__ == "__main__":
    PICTURE.write_text(drawing().svg(), encoding="utf-8")
