"""The wheels of the core and of every plugin: what is in them, and what they say about themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))]

every_package = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name if path != ROOT else "rllm-core")


def project(source: Path) -> dict[str, Any]:
    content = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = content["project"]
    return found


def module(source: Path) -> Path:
    name: str = project(source)["name"]
    return source / name.replace("-", "_")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, built from a copy so that nothing is left in the source."""
    copies, target = tmp_path_factory.mktemp("copies"), tmp_path_factory.mktemp("wheels")
    for source in SOURCES:
        copy = copies / project(source)["name"]
        copy.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(source / name, copy)
        for name in (module(source).name, "tests"):
            if (source / name).exists():
                shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", target]
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", *options, *sorted(copies.iterdir())], check=True)
    return {path.name.partition("-")[0].replace("_", "-"): path for path in target.iterdir()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


@every_package
def test_a_wheel_holds_the_module_and_its_licence(source: Path, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[project(source)["name"]]) as archive:
        packed = set(archive.namelist())
    info = {name for name in packed if ".dist-info/" in name}
    expected = {
        path.relative_to(source).as_posix()
        for path in module(source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed - info == expected
    assert f"{module(source).name}/py.typed" in packed
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in info)


@every_package
def test_the_metadata(source: Path, wheels: dict[str, Path]) -> None:
    found = metadata(wheels[project(source)["name"]])
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found["Summary"]
    assert str(found.get_payload()).strip(), "no README"
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["Version"])


@every_package
def test_the_licence_is_the_same_everywhere(source: Path) -> None:
    assert (source / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@every_package
def test_requirements_have_lower_bounds(source: Path, wheels: dict[str, Path]) -> None:
    for text in metadata(wheels[project(source)["name"]]).get_all("Requires-Dist", []):
        requirement = Requirement(text)
        assert {specifier.operator for specifier in requirement.specifier} & {">=", "==", "~="}, text
        assert requirement.url is None


@pytest.mark.parametrize("source", SOURCES[1:], ids=lambda path: path.name)
def test_a_plugin_needs_the_core_and_is_found_by_it(source: Path) -> None:
    about = project(source)
    needed = {Requirement(text).name for text in about["dependencies"]}
    assert {name for name in needed if name.startswith("rllm-")} == {"rllm-core"}
    assert about["name"] == source.name
    [(name, value)] = about["entry-points"]["rllm_core"].items()
    assert about["name"] == f"rllm-{name}"
    assert value == module(source).name


def test_the_core_installs_nothing_heavy() -> None:
    needed = {Requirement(text).name for text in project(ROOT)["dependencies"]}
    assert not needed & {"torch", "transformers", "verl", "vllm", "tinker", "ray"}


@every_package
def test_the_version_is_said_once(source: Path) -> None:
    text = (module(source) / "__init__.py").read_text(encoding="utf-8")
    said = re.findall(r'^__version__ = "(.+)"$', text, re.M)
    assert said in ([], [project(source)["version"]])
