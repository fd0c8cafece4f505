"""Mutation testing of a sample: the share of small changes of the code that a test notices.

    python -m benchmarks.mutation --revisions before=204afc1 after=HEAD

Each revision is checked out in ``bench/mutation/``, with an environment of its own. From every room, the same number of
mutants is drawn with the same seed and the same operators (those of ``cosmic-ray``, without arguments): first a place
in the code, then an operator for it. Annotations, docstrings and imports are no places. Each mutant is run against the
fast tests of its room, with ``--slow`` against all of them and the end-to-end tests; those that name the mutated module
run first. It ends at the first failure, or after ten times the duration of the unchanged tests. The last line is one
JSON object with ``killed`` and ``mutants`` per revision and room, and ``survivors``, the places to look at.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import ROOT, SETTINGS, enter_peer_environment
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

END_TO_END = ("tests/end_to_end",)
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "training": (("rllm_core/training", "rllm_core/runs", "rllm_core/run_folder"), ("tests/training", *END_TO_END)),
    "algorithms": (
        ("rllm_core/algorithms", "rllm_core/builtin/estimators", "rllm_core/builtin"),
        ("tests/algorithms", *END_TO_END),
    ),
    "plugins": (
        (
            "rllm_core/plugins",
            *(
                f"rllm_core/{module}.py"
                for module in ("plugins", "discovery", "loading", "requirements", "sections", "blame", "surroundings")
            ),
        ),
        ("tests/plugins", *END_TO_END),
    ),
    "parser": (("rllm_core/parser",), ("tests/core", *END_TO_END)),
    "engine": (("rllm_core/engine", "rllm_core/engine.py"), ("tests/core", *END_TO_END)),
}
"""Paths and tests of each room. Only paths that exist in a revision are used."""

MARKS = ("not slow and not gpu and not by_hand", "not gpu and not by_hand")
"""Tests to run: the fast ones, and with ``--slow`` all."""

PATIENCE = 10.0

FAILURE = re.compile("(FAILED|ERROR) ")


@dataclass(frozen=True)
class Mutant:
    """One change of one file: ``occurrence`` counts the places of an operator in the file, from 0."""

    file: str
    line: int
    operator: str
    occurrence: int


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Tests the mutants of all revisions."""
    for named in options.revisions:
        name, _, revision = named.partition("=")
        checkout = Checkout.of(name, revision)
        for room in options.rooms:
            for row in tested(checkout, room, options.mutants, options.seed, MARKS[options.slow]):
                trials.add({"kind": "mutant", "revision": name, "room": room, **row})
                print(f"{name} {room} {row['file']}:{row['line']} {row['outcome']}", file=sys.stderr, flush=True)


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures from the raw rows."""
    mutants = of_kind(rows, "mutant")
    survivors = [row for row in mutants if row["outcome"] == "survived"]
    drawn = Counter(f"{row['revision']}/{row['room']}" for row in mutants)
    survived = Counter(f"{row['revision']}/{row['room']}" for row in survivors)
    return {
        "mutants": dict(drawn),
        "killed": {name: count - survived[name] for name, count in drawn.items()},
        "survivors": [f"{row['revision']}: {row['file']}:{row['line']} {row['operator']}" for row in survivors],
    }


@dataclass(frozen=True)
class Checkout:
    """A revision in a folder of its own, with the environment that its Makefile makes."""

    folder: Path

    @classmethod
    def of(cls, name: str, revision: str) -> Checkout:
        """Checks a revision out and makes its environment."""
        folder = ROOT / "bench" / "mutation" / name
        if not folder.exists():
            subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        commit = subprocess.run(
            ["git", "rev-parse", revision], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        subprocess.run(["git", "fetch", "-q", str(ROOT), commit], cwd=folder, check=True)
        subprocess.run(["git", "checkout", "-q", "--force", commit], cwd=folder, check=True)
        subprocess.run(["make", ".venv/.installed"], cwd=folder, check=True, stdout=sys.stderr)
        return cls(folder)

    def files(self, paths: tuple[str, ...]) -> list[Path]:
        """Returns the Python files below ``paths``, each once."""
        found: dict[Path, None] = {}
        for path in map(self.folder.joinpath, paths):
            found |= dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else [])
        return list(found)

    def nearest_first(self, tests: tuple[str, ...], file: str) -> list[str]:
        """Returns the test files, first those that name the module or its package: they find a mutant soonest."""
        module = file.removesuffix(".py").replace("/", ".")
        package = module.rpartition(".")[0]

        def distance(path: Path) -> tuple[bool, bool]:
            text = path.read_text(encoding="utf-8")
            return module not in text, package not in text

        files = [path for folder in tests for path in sorted((self.folder / folder).rglob("test_*.py"))]
        return [str(path.relative_to(self.folder)) for path in sorted(files, key=distance)]

    def test(self, tests: Sequence[str], marks: str, seconds: float) -> Row:
        """Runs tests up to the first failure, in the given order.

        Returns:
            ``outcome``: ``survived``, ``killed`` or ``timeout``; ``by``: the tests that failed.
        """
        command = [".venv/bin/pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
        command += ["--no-loadscope-reorder", "-m", marks, *tests]
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **SETTINGS, "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                outcome = "survived" if child.wait(seconds) == 0 else "killed"
            except subprocess.TimeoutExpired:
                outcome = "timeout"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, 9)
                    child.wait()
            output.seek(0)
            return {"outcome": outcome, "by": [line[:200].rstrip() for line in output if FAILURE.match(line)]}


def tested(checkout: Checkout, room: str, count: int, seed: int, marks: str) -> Iterator[Row]:
    """Draws mutants of a room and yields a row for each."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    paths, tests = ROOMS[room]
    start = time.monotonic()
    unchanged = checkout.test(tests, marks, 3600.0)
    if unchanged["outcome"] != "survived":
        raise SystemExit(f"error: without a mutant, {unchanged['by']} fail in {checkout.folder}")
    limit = PATIENCE * (time.monotonic() - start)
    for mutant in drawn(checkout, paths, count, seed):
        with use_mutation(checkout.folder / mutant.file, get_operator(mutant.operator)(), mutant.occurrence):
            changed = subprocess.run(["git", "diff", "-U0"], cwd=checkout.folder, capture_output=True, text=True)
            diff = [line for line in changed.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
            nearest = checkout.nearest_first(tests, mutant.file)
            yield {**vars(mutant), "diff": diff, **checkout.test(nearest, marks, limit)}


def drawn(checkout: Checkout, paths: tuple[str, ...], count: int, seed: int) -> list[Mutant]:
    """Draws places, and an operator for each."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    operators = [
        (name, get_operator(name)()) for name in sorted(operator_names()) if not get_operator(name).arguments()
    ]
    places: dict[tuple[str, Any], list[Mutant]] = {}
    for file in checkout.files(paths):
        name, tree, excluded = str(file.relative_to(checkout.folder)), get_ast_from_path(file), excluded_lines(file)
        for operator, instance in operators:
            found = (begin for node in ast_nodes(tree) for begin, _ in instance.mutation_positions(node))
            for occurrence, begin in enumerate(found):
                if begin[0] not in excluded:
                    places.setdefault((name, begin), []).append(Mutant(name, begin[0], operator, occurrence))
    chance = random.Random(seed)
    return [chance.choice(places[place]) for place in chance.sample(sorted(places), min(count, len(places)))]


def excluded_lines(file: Path) -> set[int]:
    """Returns the lines of annotations, docstrings and imports, where a change has no effect at run time."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines |= set(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.AnnAssign):
            lines |= set(range(node.annotation.lineno, (node.annotation.end_lineno or 0) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given: list[str] = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description=__doc__)
    parser.add_argument(
        "--revisions", nargs="+", default=["after=HEAD"], metavar="NAME=REVISION", help="what to compare"
    )
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=list(ROOMS), help="default all")
    parser.add_argument("--mutants", type=int, default=16, help="mutants per room and revision")
    parser.add_argument("--slow", action="store_true", help="run slow tests, too, which takes hours")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    if not any(argument.startswith("--from-raw") for argument in given) and not {"-h", "--help"} & set(given):
        enter_peer_environment("benchmarks.mutation", given)
    run("mutation", parser, measure, figures, given)


if __name__ == "__main__":
    main()
