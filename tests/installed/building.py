"""Builds wheels and sdists offline from copies of the sources, to leave the sources clean."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
THIRD_PARTY = ROOT / "tests" / "packages" / "rllm-relay"

PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


def project(source: Path) -> dict[str, Any]:
    """Returns the ``[project]`` table of a distribution."""
    content = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = content["project"]
    return found


def module(source: Path) -> Path:
    """Returns the folder of the distribution's only package."""
    name: str = project(source)["name"]
    return source / name.replace("-", "_")


def copy_of(source: Path, folder: Path) -> Path:
    """Copies the files of one distribution; the core's are mixed with everything else."""
    copy = folder / project(source)["name"]
    copy.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (source / name).exists():
            shutil.copy(source / name, copy)
    for name in (module(source).name, "tests"):
        if (source / name).exists() and not (source == ROOT and name == "tests"):
            shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def build_wheels(copies: Iterable[Path], target: Path) -> dict[str, Path]:
    """Builds the wheel of each distribution; returns the paths by name."""
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", target]
    subprocess.run([*PIP, "wheel", *options, *copies], check=True)
    return {path.name.partition("-")[0].replace("_", "-"): path for path in target.iterdir()}


def build_sdist(copy: Path, target: Path) -> Path:
    """Builds the sdist of a distribution."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", target]
    subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    name, version = module(copy).name, project(copy)["version"]
    return target / f"{name}-{version}.tar.gz"


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpacks the source tree of an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")
