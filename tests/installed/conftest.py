"""The wheels of this checkout, and an environment that contains nothing else of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import building
from clean_environment import CleanEnvironment


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies the sources of each distribution; returns the folders by name."""
    folder = tmp_path_factory.mktemp("copies")
    return {building.project(source)["name"]: building.copy_of(source, folder) for source in building.SOURCES}


@pytest.fixture(scope="session")
def wheels(copies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds the wheel of each distribution; returns the paths by name."""
    return building.build_wheels(copies.values(), tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def clean(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """Our core, devkit, backend, parser, viewer and workflows, and two third-party workflows, one made by ``new``."""
    names = ("rllm-core", "rllm-devkit", "rllm-local", "rllm-renderers", "rllm-viewer", "rllm-workflows")
    ours = [wheels[name] for name in names]
    environment = CleanEnvironment(tmp_path_factory.mktemp("clean") / "environment", ours)
    environment.run("rllm-core", "new", "workflow", "tidy")
    sources = tmp_path_factory.mktemp("theirs")
    theirs = [
        building.copy_of(building.THIRD_PARTY, sources),
        building.copy_of(environment.home / "rllm-tidy", sources),
    ]
    environment.install(*building.build_wheels(theirs, tmp_path_factory.mktemp("their-wheels")).values())
    return environment


@pytest.fixture(scope="session")
def bare(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """Our core alone."""
    return CleanEnvironment(tmp_path_factory.mktemp("bare") / "environment", [wheels["rllm-core"]])
