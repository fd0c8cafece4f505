"""Tests every ``pip install`` of pages and messages against the wheels: packages and extras exist there."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import PIP, ROOT, SOURCES, module, project
from packaging.requirements import InvalidRequirement, Requirement

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])
# Of a name of ours: what a reader pastes after "pip install", up to the end of the command.
COMMAND = re.compile(r"pip install ((?:[^`\n#:;)(|]|\\\n)+)")
OURS = re.compile(r"rllm[-_][\w-]+(?:\[[\w,-]+\])?")


def strings(path: Path) -> Iterator[str]:
    """Yields the strings of a module that mentions pip; to parse all modules takes seconds in each test process."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)) if "pip" in source else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def texts() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        yield page, page.read_text(encoding="utf-8")
    for source in SOURCES:
        for path in sorted(module(source).rglob("*.py")):
            if "scaffold" not in path.parts:  # its names are filled in
                yield from ((path, text) for text in strings(path))


def named() -> dict[str, str]:
    """Returns each requirement on one of our packages in a pip command, with the file that has it."""
    ours = {project(source)["name"] for source in SOURCES}
    found: dict[str, str] = {}
    for path, text in texts():
        for command in COMMAND.findall(text):
            if re.search(r"(^| )-e ", command):
                continue  # of the reader's own package
            for word in OURS.findall(command):
                try:
                    requirement = Requirement(word)
                except InvalidRequirement:
                    continue
                if requirement.name in ours or requirement.extras:
                    found[word] = path.relative_to(ROOT).as_posix()
    return found


NAMED = named()


def test_they_are_found() -> None:
    assert {"rllm-core[plots]", "rllm-local[lora]", "rllm-workflows[math]", "rllm-verl[gpu]"} <= set(NAMED)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_package_and_its_extras_exist(name: str) -> None:
    requirement = Requirement(name)
    tables = {project(source)["name"]: project(source) for source in SOURCES}
    assert requirement.name in tables, f"{NAMED[name]} installs {name}"
    assert requirement.extras <= set(tables[requirement.name].get("optional-dependencies", {})), NAMED[name]


@pytest.mark.slow
def test_pip_finds_them_in_a_folder_of_wheels(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Without the dependencies, which `release.py` installs."""
    folder = next(iter(wheels.values())).parent
    done = subprocess.run(
        [*PIP, "install", "--no-index", "--find-links", folder, "--no-deps", "--target", tmp_path, *sorted(NAMED)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr
    installed = {path.name.split("-")[0] for path in tmp_path.glob("*.dist-info")}
    assert installed == {Requirement(name).name.replace("-", "_") for name in NAMED}


def test_the_versions_of_this_checkout_go_together() -> None:
    """Each requirement of one of our packages on another admits the version of this checkout."""
    versions = {project(source)["name"]: project(source)["version"] for source in SOURCES}
    for source in SOURCES:
        about = project(source)
        extras = [text for texts in about.get("optional-dependencies", {}).values() for text in texts]
        for requirement in map(Requirement, [*about["dependencies"], *extras]):
            if requirement.name in versions:
                assert requirement.specifier.contains(versions[requirement.name]), f"{about['name']}: {requirement}"


def test_the_changelog_begins_with_the_version_of_the_core() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [first, *_] = re.findall(r"^## (\S+)", text, re.M)
    assert first == project(ROOT)["version"]


def test_the_makefile_pins_what_the_constraints_pin() -> None:
    """A torch other than that of the pins would bring CUDA into the environments."""
    [pinned] = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"torch==(\d\S*)", makefile)) == {pinned}
