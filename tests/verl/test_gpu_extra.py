"""The extra ``gpu``, compared with the extras of the installed verl."""

from __future__ import annotations

import tomllib
from importlib.metadata import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rllm_verl.verl_api import IMPORTS, SUPPORTED

ABOUT = tomllib.loads(
    (Path(__file__).parents[2] / "plugins" / "rllm-verl" / "pyproject.toml").read_text(encoding="utf-8")
)["project"]
GPU = {found.name: found for found in map(Requirement, ABOUT["optional-dependencies"]["gpu"])}


def test_the_gpu_extra_pins_what_verl_pins() -> None:
    verl, about = GPU["verl"], metadata("verl")
    assert str(verl.specifier) == f"=={about['Version']}"
    assert verl.extras <= set(about.get_all("Provides-Extra", []))
    pinned: dict[str, str] = {}
    for requirement in map(Requirement, about.get_all("Requires-Dist", [])):
        chosen = requirement.marker and any(requirement.marker.evaluate({"extra": extra}) for extra in verl.extras)
        if chosen and any(specifier.operator == "==" for specifier in requirement.specifier):
            pinned[requirement.name] = str(requirement.specifier)
    named = {name: str(found.specifier) for name, found in GPU.items() if name not in ("verl", "rllm-renderers")}
    assert {"vllm", "torch", "flash-attn", "transformers", "cupy-cuda13x"} <= set(named)
    assert named.items() <= pinned.items()


def test_the_supported_versions_are_those_that_are_required() -> None:
    [verl] = [found for found in map(Requirement, ABOUT["dependencies"]) if found.name == "verl"]
    assert verl.specifier == SUPPORTED
    assert all(SUPPORTED.contains(version) for version in IMPORTS)
