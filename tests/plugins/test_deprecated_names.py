"""Tests that names that moved still work, with a warning that names the new one."""

from __future__ import annotations

import importlib
import sys

import pytest

from rllm_core import providers
from rllm_core.moved import MOVED

NEW = (providers.GroupScorerProvider, providers.RolloutHostProvider, providers.TaskSamplerProvider)


@pytest.mark.parametrize("record", [kind for kind in providers.KINDS if kind not in NEW])
def test_a_record_class_has_its_old_name(record: type[providers.Provider], monkeypatch: pytest.MonkeyPatch) -> None:
    old = record.__name__.removesuffix("Provider")
    monkeypatch.delitem(vars(providers), old, raising=False)  # a name warns once
    new = rf"rllm_core\.providers\.{record.__name__}"
    with pytest.warns(DeprecationWarning, match=rf"rllm_core\.providers\.{old} is now {new}"):
        assert getattr(providers, old) is record


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Workflows'"):
        providers.Workflows  # noqa: B018


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_module_that_moved_has_its_old_name(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        assert importlib.import_module(old) is importlib.import_module(MOVED[old])
    monkeypatch.delitem(sys.modules, old)


def test_without_its_package_a_module_that_moved_has_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rllm_core.training.verify", raising=False)
    monkeypatch.setitem(sys.modules, "rllm_viewer", None)
    with pytest.raises(ImportError, match=r"rllm_core\.training\.verify has moved to .*: pip install rllm-viewer"):
        importlib.import_module("rllm_core.training.verify")
