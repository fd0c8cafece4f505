"""Tests that the file of our own plugins' providers says what these plugins provide."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from rllm_core.plugins import PluginManager
from rllm_core.plugins.missing import FIRST_PARTY_FILE, first_party
from rllm_core.providers import KINDS, CommandProvider

PLUGINS = Path(__file__).parents[2] / "plugins"
DISTRIBUTIONS = sorted(path.parent.name for path in PLUGINS.glob("*/pyproject.toml"))


def test_every_distribution_is_in_the_file() -> None:
    assert sorted(tomllib.loads(FIRST_PARTY_FILE.read_text(encoding="utf-8"))) == DISTRIBUTIONS


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_file_lists_what_a_plugin_provides(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((PLUGINS / distribution / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    monkeypatch.syspath_prepend(str(PLUGINS / distribution))
    manager = PluginManager()
    for name, module in project["entry-points"]["rllm_core"].items():
        manager.register(importlib.import_module(module), name)
    provided = {
        (kind, one.record.name)
        for kind in KINDS
        for one in manager.providers(kind).values()
        if one.plugin.name in project["entry-points"]["rllm_core"]
    }
    # Help lists every command in the file as unavailable where it is not installed, so only general ones are in it.
    provided.discard((CommandProvider, "verl-export"))
    assert provided == {key for key, owner in first_party().items() if owner == distribution}
