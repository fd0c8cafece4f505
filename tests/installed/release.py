"""Installs every wheel of a folder into a new environment, and trains there: ``make release-check``.

Unlike `test_installed`, pip resolves and downloads third-party packages, as on a user's machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Extras that run anywhere. Those of rllm-verl need a GPU, and rllm-tinker's need another transformers.
EXTRAS = {
    "rllm_core": "parquet,plots,testing,viewer",
    "rllm_local": "lora,starter",
    "rllm_renderers": "vision",
    "rllm_workflows": "math,parquet",
}


def requirements(wheels: Path) -> list[str]:
    """Returns a requirement per wheel, with the version of the wheel and the extras above."""
    names = [path.name.split("-")[:2] for path in sorted(wheels.glob("rllm_*.whl"))]
    return [f"{name}[{EXTRAS[name]}]=={version}" if name in EXTRAS else f"{name}=={version}" for name, version in names]


def check(wheels: Path, constraints: Path, folder: Path) -> None:
    """Installs the wheels into ``folder`` and uses them; raises `CalledProcessError` at the first failure."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
    python = folder.resolve() / "environment" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", python]
    # The torch of this repository: another version may bring gigabytes of CUDA. Its other pins are stricter than what
    # the packages declare, and verl needs an older transformers.
    lines = constraints.read_text(encoding="utf-8").splitlines()
    [torch] = [line for line in lines if line.startswith("torch==")]
    subprocess.run([*pip, "install", "--find-links", wheels, torch, *requirements(wheels)], check=True)
    subprocess.run([*pip, "check"], check=True)

    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RLLM_"))}
    home = folder.resolve() / "home"
    home.mkdir()

    def run(*arguments: str) -> str:
        command = [python.with_name("rllm-core"), *arguments]
        done = subprocess.run(
            command,
            cwd=home,
            env={**environment, "RLLM_CONFIG_DIR": str(home)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    found = json.loads(run("plugins", "--load", "--json"))
    assert len(found) == len(requirements(wheels)) - 1, "a plugin is missing"
    broken = [(row["name"], row["status"], row["warnings"]) for row in found if row["status"] != "loaded"]
    assert not broken, broken
    run("train", "sort", "--backend", "local", "--run-dir", "run", "-o", "training.steps=5")
    summary = json.loads((home / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["optimizer_steps"]) == ("completed", 5), summary
    assert (home / "run" / "reward.png").is_file(), "the extra [plots] draws no plot"
    for command in ("verify run", "show run", "eval --checkpoint run", "export-model run out"):
        run(*command.split())
    print(f"{len(found) + 1} wheels install together; a run trained, was verified, shown, evaluated and exported")


def main(arguments: Sequence[str]) -> None:
    """Checks a folder of wheels.

    Args:
        arguments: Folder of wheels, file of constraints, and a folder to replace.
    """
    wheels, constraints, folder = map(Path, arguments)
    check(wheels, constraints, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
