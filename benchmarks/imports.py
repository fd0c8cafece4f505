"""Import time of the core relative to its dependencies, and duration of ``rllm-core plugins``.

    python -m benchmarks.imports

Figures: ``import_over_dependencies`` and ``plugins_command_ms``.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run

CONTRACTS = ("types", "engine", "parser", "backend", "workflow", "config", "hookspecs", "providers", "plugins")
IMPORTS = {
    "package": "import rllm_core",
    "contracts": "import " + ", ".join(f"rllm_core.{module}" for module in CONTRACTS),
}

TIMED = """
import json, sys, time
before = set(sys.modules)
wall, cpu = time.perf_counter(), time.process_time()
{code}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
modules = [name for name in sys.modules if name not in before]
print(json.dumps({{"wall_seconds": wall, "cpu_seconds": cpu, "modules": modules}}))
"""


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Alternates fresh interpreters for the core and for its dependencies."""
    for what, ours in IMPORTS.items():
        theirs = "\n".join(f"import {name}" for name in third_party(_import(ours)["modules"]))
        _import(theirs)  # warm the file cache, so that neither side pays for the first read
        for trial in range(options.trials):
            for side, code in alternating({"core": ours, "dependencies": theirs}, trial):
                seconds = _import(code)
                del seconds["modules"]
                trials.add({"kind": "import", "what": what, "side": side, "trial": trial, **seconds})
    _plugins_command()
    for trial in range(options.trials):
        trials.add({"kind": "plugins_command", "trial": trial, **_plugins_command()})


def alternating(sides: dict[str, Any], trial: int) -> list[tuple[str, Any]]:
    """Returns the sides in the order of one trial; the order changes with every trial."""
    return list(sides.items())[:: 1 if trial % 2 == 0 else -1]


def third_party(modules: Sequence[str]) -> list[str]:
    """Returns the third-party modules, in order, without installation machinery.

    All modules are listed, because a package may delay most of its import until it is used.
    """
    return [
        name
        for name in modules
        if (package := name.partition(".")[0]) not in sys.stdlib_module_names
        and package != "rllm_core"
        and not package.startswith("_")
    ]


def _import(code: str) -> dict[str, Any]:
    # In an empty folder, because the repository root on sys.path would speed up some imports.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", TIMED.format(code=code)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **SETTINGS},
        )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _plugins_command() -> Row:
    command = Path(sys.executable).with_name("rllm-core")
    started, before = time.perf_counter(), os.times()
    subprocess.run([command, "plugins"], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **SETTINGS})
    wall, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_seconds": wall, "cpu_seconds": cpu}


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures."""
    over_dependencies = {}
    for what in IMPORTS:
        dependencies, core = (
            [row["wall_seconds"] for row in of_kind(rows, "import", what=what, side=side)]
            for side in ("dependencies", "core")
        )
        over_dependencies[what] = paired_ratio(zip(dependencies, core, strict=True))
    commands = of_kind(rows, "plugins_command")
    return {
        "import_over_dependencies": round(over_dependencies["package"], 3),
        "contracts_over_dependencies": round(over_dependencies["contracts"], 3),
        "plugins_command_ms": round(1e3 * min(row["wall_seconds"] for row in commands), 1),
        "plugins_command_median_ms": round(1e3 * statistics.median(row["wall_seconds"] for row in commands), 1),
        "plugins_command_cpu_ms": round(1e3 * statistics.median(row["cpu_seconds"] for row in commands), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__)
    parser.add_argument("--trials", type=int, default=30, help="fresh interpreters per side (default 30)")
    run("imports", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
