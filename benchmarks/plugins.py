"""Cost of many installed packages for ``rllm-core plugins``, and of ``rllm-core --help`` relative to its dependencies.

    python -m benchmarks.plugins

Figures: ``many_over_few`` and ``help_over_dependencies``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.imports import TIMED, alternating, third_party
from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run

MANY_DISTRIBUTIONS, MANY_PLUGINS, FEW_PLUGINS = 300, 30, 3
README_CHARACTERS = 6_000

# The minimum of a plugin is its entry module; --help asks each of them for its commands.
PLUGIN = """
from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider

RLLM_CORE_API = "1.0"


@hookimpl
def workflows():
    return [WorkflowProvider(name="{name}", load="{module}.workflow:Any", summary="One of many.")]
"""

HELP = """
import contextlib, io
from rllm_core.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["--help"])
"""


class Environment:
    """Virtual environment with the core, its dependencies and made-up packages.

    Args:
        folder: Folder of the environment.
        distributions: Number of installed distributions; None for as few as possible.
        plugins: Number of plugins among them.
    """

    def __init__(self, folder: Path, distributions: int | None, plugins: int) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        [self._site_packages] = folder.glob("lib/python*/site-packages")
        for path in needed_by_the_core():
            (self._site_packages / path.name).symlink_to(path)
        (self._site_packages / "rllm_core").symlink_to(ROOT / "rllm_core")
        self._install("rllm-core", "0.0", [])
        for number in range(plugins):
            name, module = f"rllm-made-up-{number}", f"rllm_made_up_{number}"
            (self._site_packages / f"{module}.py").write_text(PLUGIN.format(name=f"many-{number}", module=module))
            self._install(name, "1.0", ["[rllm_core]", f"made-up-{number} = {module}"])
        self.distributions = len(list(self._site_packages.glob("*.dist-info")))
        for number in range((distributions or 0) - self.distributions):
            script = ["[console_scripts]", f"script-{number} = made_up_{number}:main"] if number % 2 else []
            self._install(f"made-up-{number}", f"1.{number}", script)
            self.distributions += 1

    def _install(self, name: str, version: str, entry_points: list[str]) -> None:
        folder = self._site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        needs = "".join(f"Requires-Dist: needed-{number}>=1.0\n" for number in range(10))
        about = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{needs}\n{'x' * README_CHARACTERS}\n"
        (folder / "METADATA").write_text(about)
        (folder / "RECORD").write_text("".join(f"{name}/module_{number}.py,,\n" for number in range(50)))
        if entry_points:
            (folder / "entry_points.txt").write_text("\n".join([*entry_points, ""]))

    def seconds(self, *arguments: str) -> Row:
        """Times a command in a fresh interpreter."""
        started, before = time.perf_counter(), os.times()
        self._run("-m", "rllm_core", *arguments)
        wall, after = time.perf_counter() - started, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return {"wall_seconds": wall, "cpu_seconds": cpu}

    def timed(self, code: str) -> Row:
        """Times code in a fresh interpreter, without its start, and lists the imported modules."""
        found: Row = json.loads(self._run("-c", TIMED.format(code=code)))
        return found

    def _run(self, *arguments: str) -> str:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RLLM_"))}
        # Not in the repository, because its root on sys.path would speed up some imports.
        done = subprocess.run(
            [self.python, *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.python.parent,
            env={**environ, **SETTINGS, "RLLM_CONFIG_DIR": str(self.python.parent)},
        )
        return done.stdout


def needed_by_the_core() -> Iterator[Path]:
    """Yields the installed files and folders of the core's dependencies."""
    seen, queue = set[str](), ["rllm-core"]
    names = set[str]()
    while queue:
        found = distribution(queue.pop())
        if found.name in seen:
            continue
        seen.add(found.name)
        if found.name != "rllm-core":
            root = Path(str(found.locate_file("")))
            names |= {str(root / file.parts[0]) for file in found.files or () if file.parts[0] != ".."}
        needs = [Requirement(text) for text in found.requires or ()]
        queue += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    yield from (Path(name) for name in sorted(names) if not name.endswith(("__pycache__", ".pth")))


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Alternates fresh interpreters in the environments, then the command line and its dependencies."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sides = {
            "few": Environment(folder / "few", None, FEW_PLUGINS),
            "few_of_many": Environment(folder / "few_of_many", MANY_DISTRIBUTIONS, FEW_PLUGINS),
            "many": Environment(folder / "many", MANY_DISTRIBUTIONS, MANY_PLUGINS),
        }
        for side, environment in sides.items():
            listed = json.loads(environment._run("-m", "rllm_core", "plugins", "--json"))
            trials.add(
                {
                    "kind": "environment",
                    "side": side,
                    "distributions": environment.distributions,
                    "plugins": sum(row["status"] == "available" for row in listed),
                }
            )
        for command in (("plugins",), ("--help",)):
            for trial in range(-1, options.trials):  # the first one warms the file cache
                for side, environment in alternating(sides, trial):
                    seconds = environment.seconds(*command)
                    if trial >= 0:
                        trials.add({"kind": "command", "command": command[0], "side": side, "trial": trial, **seconds})
        few = sides["few"]
        dependencies = "\n".join(f"import {name}" for name in third_party(few.timed(HELP)["modules"]))
        for trial in range(-1, options.trials):
            for side, code in alternating({"help": HELP, "dependencies": dependencies}, trial):
                timed = few.timed(code)
                modules = timed.pop("modules")
                if trial >= 0:
                    trials.add({"kind": "help", "side": side, "trial": trial, **timed, "modules": len(modules)})


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures."""
    found: Figures = {}
    for command, name in (("plugins", "many_over_few"), ("--help", "help_many_over_few")):
        for clock, suffix in (("wall_seconds", ""), ("cpu_seconds", "_cpu")):
            taken = {side: _seconds(rows, clock, command=command, side=side) for side in ("few", "few_of_many", "many")}
            found[name + suffix] = _ratio(taken["few"], taken["many"])
            found[f"{name}_plugins{suffix}"] = _ratio(taken["few_of_many"], taken["many"])
        for side in ("few", "many"):
            milliseconds = [1e3 * each for each in _seconds(rows, "wall_seconds", command=command, side=side)]
            found[f"{command.lstrip('-')}_{side}_ms"] = round(statistics.median(milliseconds), 1)
    for clock, suffix in (("wall_seconds", ""), ("cpu_seconds", "_cpu")):
        dependencies, helped = (
            [row[clock] for row in of_kind(rows, "help", side=side)] for side in ("dependencies", "help")
        )
        found[f"help_over_dependencies{suffix}"] = _ratio(dependencies, helped)
    return found


def _seconds(rows: Sequence[Row], clock: str, **wanted: str) -> list[float]:
    return [row[clock] for row in of_kind(rows, "command", **wanted)]


def _ratio(first: Sequence[float], second: Sequence[float]) -> float:
    return round(paired_ratio(zip(first, second, strict=True)), 3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plugins", description=__doc__)
    parser.add_argument("--trials", type=int, default=30, help="fresh interpreters per side (default 30)")
    run("plugins", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
