"""Tests that the names of other libraries lead to keys that exist, and say something where they lead nowhere."""

from __future__ import annotations

import pytest
from generate import first_party_plugins, keys, sections

from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError
from rllm_core.run_file import foreign_keys

OURS = {f"{path}.{name}" for path, _, model in sections(first_party_plugins()) for name, _, _ in keys(model)}


def test_our_keys_exist() -> None:
    named = {key for entry in foreign_keys().values() for key in entry["use"]}
    assert len(named) > 30
    assert sorted(named - OURS) == []


@pytest.mark.parametrize("name", foreign_keys())
def test_an_entry_is_complete(name: str) -> None:
    entry = foreign_keys()[name]
    assert entry.keys() <= {"of", "use", "note"}
    assert entry["of"]
    assert entry["use"] or entry["note"]


@pytest.mark.parametrize("name", foreign_keys())
def test_every_name_gets_its_hint(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config("sort", first_party_plugins(), overrides=[f"{name}=1"])
    missing = [key for key in foreign_keys()[name]["use"] if key not in str(caught.value)]
    assert missing == []
    assert foreign_keys()[name]["of"] in str(caught.value)
