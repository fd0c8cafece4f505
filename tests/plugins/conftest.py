"""Fixture packages, built as wheels and unpacked, each into a separate folder; and the command line beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import importlib_metadata
import pytest
from hatchling.builders.wheel import WheelBuilder
from in_process import run_in_process

from rllm_core.plugins import PluginManager
from rllm_core.plugins.discovery import Candidate, find_plugins
from rllm_core.plugins.settings import Settings

sys.path.insert(0, str(Path(__file__).with_name("support")))

PACKAGES = Path(__file__).parent.parent / "packages"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Provides ``installed("rllm-good", ...)``, which returns the folders to put on ``sys.path``."""
    wheels = tmp_path_factory.mktemp("wheels")
    sites = tmp_path_factory.mktemp("sites")

    def install(*packages: str) -> list[str]:
        for package in packages:
            if not (sites / package).exists():
                # What pip does with such a package, without its own processes and their start.
                [wheel] = WheelBuilder(str(PACKAGES / package)).build(directory=str(wheels), versions=["standard"])
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(sites / package)
        return [str(sites / package) for package in packages]

    return install


@pytest.fixture
def candidates(
    installed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Candidate, ...]]]:
    """Provides ``candidates("rllm-good", ...)``: these packages, importable in this process until the test ends."""
    known = set(sys.modules)

    def find(*packages: str) -> tuple[Candidate, ...]:
        paths = installed(*packages)
        for path in paths:
            monkeypatch.syspath_prepend(path)
        return find_plugins(importlib_metadata.distributions(path=paths))

    yield find
    fixtures = tuple(path.name.replace("-", "_") for path in PACKAGES.iterdir())
    for module in set(sys.modules) - known:
        if module.startswith(fixtures):
            del sys.modules[module]


@pytest.fixture
def manager(candidates: Callable[..., tuple[Candidate, ...]]) -> Callable[..., PluginManager]:
    """Provides ``manager("rllm-good", ..., settings=...)``: a plugin manager that sees these packages only."""

    def build(*packages: str, settings: Settings | None = None, **options: object) -> PluginManager:
        return PluginManager(candidates(*packages), settings, **options)  # type: ignore[arg-type]

    return build


@pytest.fixture
def rllm_core(installed: Callable[..., list[str]], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Provides ``rllm_core("plugins", "--json", packages=[...])``: runs the real command line in this process.

    ``PYTHONPATH=`` puts further folders ahead of the installed packages.
    """

    def run(*args: str, packages: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        environ = environment(installed(*packages), tmp_path, variables)
        path = environ["PYTHONPATH"].split(os.pathsep)
        return run_in_process(args, folder=tmp_path, environment=environ, path=path)

    return run


@pytest.fixture
def rllm_core_process(
    installed: Callable[..., list[str]], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Does the same in a separate process, for what a plugin does to the process that it is in."""

    def run(*args: str, packages: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        environ = environment(installed(*packages), tmp_path, variables)
        command = [sys.executable, "-P", "-m", "rllm_core", *args]
        return subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )

    return run


def environment(sites: list[str], folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """Returns the variables of a command that sees the packages of ``sites``."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RLLM_")}
    inherited = [path for path in (environ.get("PYTHONPATH"),) if path]
    environ["PYTHONPATH"] = os.pathsep.join([*sites, *inherited])
    return {**environ, "RLLM_CONFIG_DIR": str(folder / "config"), **variables}
