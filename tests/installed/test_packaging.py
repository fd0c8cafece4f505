"""Tests the wheels and sdists of the core and every plugin: their contents and metadata."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from building import ROOT, SOURCES, build_sdist, build_wheels, module, project, unpacked
from packaging.requirements import Requirement

every_package = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name if path != ROOT else "rllm-core")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def sources(source: Path, folder: Path) -> set[str]:
    return {
        path.relative_to(source).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
@every_package
def test_a_wheel_holds_the_module_and_its_licence(source: Path, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[project(source)["name"]]) as archive:
        packed = set(archive.namelist())
    info = {name for name in packed if ".dist-info/" in name}
    assert packed - info == sources(source, module(source))
    assert f"{module(source).name}/py.typed" in packed
    assert {name.partition(".dist-info/")[2] for name in info} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


@pytest.mark.slow
@pytest.mark.slow
@every_package
def test_an_sdist_builds_the_same_wheel(
    source: Path, copies: dict[str, Path], wheels: dict[str, Path], tmp_path: Path
) -> None:
    """No file is lost on the way through a package index, and no unrelated file is shipped."""
    name = project(source)["name"]
    sdist = build_sdist(copies[name], tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    tests = sources(source, source / "tests") if source != ROOT else set()
    assert packed - tests == {"PKG-INFO", "README.md", "LICENSE", "pyproject.toml", *sources(source, module(source))}
    assert packed & tests in (set(), tests)
    again = build_wheels([unpacked(sdist, tmp_path)], tmp_path / "wheel")[name]
    assert contents(again) == contents(wheels[name])


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
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


@pytest.mark.slow
@every_package
def test_requirements_have_lower_bounds(source: Path, wheels: dict[str, Path]) -> None:
    for text in metadata(wheels[project(source)["name"]]).get_all("Requires-Dist", []):
        requirement = Requirement(text)
        assert {specifier.operator for specifier in requirement.specifier} & {">=", "==", "~="}, text
        assert requirement.url is None


# Plugins that use another one as a library.
BUILT_ON = {"rllm-verifiers": ("rllm-gateway",)}


@pytest.mark.parametrize("source", SOURCES[1:], ids=lambda path: path.name)
def test_a_plugin_needs_the_core_and_is_found_by_it(source: Path) -> None:
    about = project(source)
    needed = {Requirement(text).name for text in about["dependencies"]}
    assert {name for name in needed if name.startswith("rllm-")} == {"rllm-core", *BUILT_ON.get(source.name, ())}
    assert about["name"] == source.name
    [(name, value)] = about["entry-points"]["rllm_core"].items()
    assert about["name"] == f"rllm-{name}"
    assert value == module(source).name


def test_the_core_installs_nothing_heavy() -> None:
    needed = {Requirement(text).name for text in project(ROOT)["dependencies"]}
    assert not needed & {"torch", "transformers", "verl", "vllm", "tinker", "ray"}


@every_package
def test_the_version_is_said_once(source: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in module(source).glob("*.py")]
    said = re.findall(r'^__version__ = "(.+)"$', "\n".join(texts), re.M)
    assert said in ([], [project(source)["version"]])
