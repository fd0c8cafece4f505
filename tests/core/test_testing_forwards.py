"""Tests that ``rllm_core.testing``, which is deprecated, forwards to rllm-devkit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

import rllm_devkit.checks
import rllm_devkit.scripted

SUBMODULES = {
    "contracts": "rllm_devkit.contracts",
    "faults": "rllm_devkit.faults",
    "parsers": "rllm_devkit.checks.parsers",
    "plugin": "rllm_devkit.scripted_plugin",
    "probe": "rllm_devkit.checks.engine_probe",
    "scripted": "rllm_devkit.scripted",
    "workflows": "rllm_devkit.checks.workflows",
}


@pytest.fixture(autouse=True)
def _imported_anew() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("rllm_core.testing")]:
        del sys.modules[name]


def test_names_are_the_same_objects_and_warn_once() -> None:
    testing = importlib.import_module("rllm_core.testing")
    with pytest.warns(DeprecationWarning, match=r"is now rllm_devkit\.checks\.check_backend"):
        assert testing.check_backend is rllm_devkit.checks.check_backend
    assert testing.check_backend is rllm_devkit.checks.check_backend
    with pytest.warns(DeprecationWarning, match=r"is now rllm_devkit\.scripted\.ByteParser"):
        from rllm_core.testing import ByteParser
    assert ByteParser is rllm_devkit.scripted.ByteParser


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_are_the_same_modules(name: str) -> None:
    moved = importlib.import_module(SUBMODULES[name])
    with pytest.warns(DeprecationWarning, match=f"rllm_core.testing.{name} is now {SUBMODULES[name]}") as warned:
        assert importlib.import_module(f"rllm_core.testing.{name}") is moved
    assert len(warned) == 1
    assert moved.__spec__ is not None
    assert moved.__spec__.name == SUBMODULES[name], "the module keeps its own name"
    assert getattr(importlib.import_module("rllm_core.testing"), name) is moved


def test_unknown_names_are_errors() -> None:
    testing = importlib.import_module("rllm_core.testing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = testing.nothing
    with pytest.raises(ModuleNotFoundError, match=r"rllm_core\.testing\.nothing"):
        importlib.import_module("rllm_core.testing.nothing")


@pytest.mark.parametrize("name", ["rllm_core.testing", "rllm_core.testing.scripted"])
def test_without_the_devkit_the_error_has_the_pip_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rllm_devkit", None)
    with pytest.raises(ImportError, match="pip install rllm-devkit"):
        importlib.import_module(name)
