"""Packages created by the real command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[4] / "tests" / "support"))

from forked import Forks, forks
from made import NAMES, environment

from rllm_core.cli import main


@pytest.fixture(scope="session")
def rllm_core() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in a separate process: ``rllm_core("plugins", cwd=folder, site=folder)``.

    ``site`` is a folder filled by ``pip install --target``; further arguments are variables of its environment.
    """

    def run(*arguments: str, cwd: Path, site: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "rllm_core", *arguments],
            cwd=cwd,
            env={**environment(cwd, site), **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def forking() -> Iterator[Forks]:
    """Starts commands and programs as forks of a process that has imported torch."""
    with forks() as made:
        yield made


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Creates a package of each kind; returns the folders by kind."""
    root = tmp_path_factory.mktemp("packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for kind, name in NAMES.items():
            with pytest.raises(SystemExit) as leaving:
                main(["new", kind, name])
            assert not leaving.value.code
    return {kind: root / f"rllm-{name.replace('_', '-')}" for kind, name in NAMES.items()}
