"""Fixture packages, built and installed with pip, each into a separate folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import importlib_metadata
import pytest

from rllm_core.discovery import Candidate, Settings, find_plugins
from rllm_core.plugins import PluginManager

sys.path.insert(0, str(Path(__file__).with_name("support")))

PACKAGES = Path(__file__).parent.parent / "packages"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Provides ``installed("rllm-good", ...)``, which returns the folders to put on ``sys.path``."""
    wheels = tmp_path_factory.mktemp("wheels")
    sites = tmp_path_factory.mktemp("sites")
    sources = sorted(str(path.parent) for path in PACKAGES.glob("*/pyproject.toml"))
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*PIP, "wheel", *offline, "--wheel-dir", wheels, *sources], check=True)

    def install(*packages: str) -> list[str]:
        for package in packages:
            if not (sites / package).exists():
                [wheel] = wheels.glob(f"{package.replace('-', '_')}-[0-9]*.whl")
                target = ["--no-compile", "--target", sites / package]
                subprocess.run([*PIP, "install", "--no-deps", "--no-index", *target, wheel], check=True)
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
    """Provides ``rllm_core("plugins", "--json", packages=[...])``: runs the real command line in a separate process."""

    def run(*args: str, packages: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("RLLM_")}
        inherited = [path for path in (environ.get("PYTHONPATH"),) if path]
        environ["PYTHONPATH"] = os.pathsep.join([*installed(*packages), *inherited])
        environ["RLLM_CONFIG_DIR"] = str(tmp_path / "config")
        environ.update(variables)
        command = [sys.executable, "-P", "-m", "rllm_core", *args]
        return subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    return run
