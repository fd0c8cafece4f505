"""The exact versions for GPU machines, compared with the metadata of installed distributions."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "plugins" / "rllm-verl" / "constraints-gpu.txt"
OURS = ("rllm-core", "rllm-renderers", "rllm-workflows", "rllm-local", "rllm-verl")
MACHINE = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
PYTHONS = ("3.11", "3.12")


def environment(python: str, extra: str = "") -> dict[str, str]:
    return MACHINE | {"python_version": python, "python_full_version": f"{python}.9", "extra": extra}


def pins(python: str) -> dict[str, str]:
    """Returns the version of each package."""
    found: dict[str, str] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is not None and not pin.marker.evaluate(environment(python)):
            continue
        [specifier] = pin.specifier
        assert specifier.operator == "=="
        assert pin.url is None
        assert not pin.extras
        assert pin.name == canonicalize_name(pin.name)
        assert pin.name not in found
        found[pin.name] = specifier.version
    return found


def required(name: str, python: str, extras: set[str]) -> Iterator[Requirement]:
    """Yields what a distribution requires, with the extras of its own that its extras name."""
    if name in OURS:
        folder = REPOSITORY if name == "rllm-core" else REPOSITORY / "plugins" / name
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = [
            *project["dependencies"],
            *(line for each in extras for line in project["optional-dependencies"][each]),
        ]
    else:
        lines = metadata(name).get_all("Requires-Dist", [])
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate(environment(python, extra)) for extra in extras | {""}):
            continue
        if requirement.name == name:
            yield from required(name, python, requirement.extras)
        else:
            yield requirement


def unmet(name: str, python: str, extras: set[str]) -> list[str]:
    found = pins(python)
    return [
        f"{name} requires {requirement}, and the file has {found.get(canonicalize_name(requirement.name))}"
        for requirement in required(name, python, extras)
        if requirement.name not in OURS
        and not requirement.specifier.contains(found.get(canonicalize_name(requirement.name), "none"), prereleases=True)
    ]


@pytest.mark.parametrize("python", PYTHONS)
def test_our_distributions_and_verl_are_satisfied(python: str) -> None:
    [verl] = [each for each in required("rllm-verl", python, {"gpu"}) if each.name == "verl" and each.extras]
    assert version("verl") == pins(python)["verl"]
    assert unmet("verl", python, verl.extras) == []
    for name in OURS:
        assert unmet(name, python, {"gpu"} if name == "rllm-verl" else set()) == []


@pytest.mark.parametrize("python", PYTHONS)
def test_packages_that_are_installed_here_in_the_same_version_are_satisfied(python: str) -> None:
    checked = []
    for name, pinned in pins(python).items():
        try:
            here = version(name)
        except PackageNotFoundError:
            continue
        if here == pinned:
            checked.append(name)
            assert unmet(name, python, set()) == [], name
    assert {"ray", "verl", "tensordict"} <= set(checked)


def test_a_wrong_version_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / FILE.name
    text = FILE.read_text(encoding="utf-8")
    wrong.write_text(text.replace(f"tensordict=={pins('3.11')['tensordict']}", "tensordict==0.9.0"), encoding="utf-8")
    monkeypatch.setitem(globals(), "FILE", wrong)
    found = unmet("verl", "3.11", {"vllm"})
    assert found
    assert all(line.startswith("verl requires tensordict") for line in found)


def test_it_names_no_place() -> None:
    assert not [line for line in FILE.read_text(encoding="utf-8").splitlines() if "://" in line or line.startswith("-")]
