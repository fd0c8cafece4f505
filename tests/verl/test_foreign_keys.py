"""Tests that the names that the errors and the page attribute to verl are keys of its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl
import yaml

from rllm_core.run_file import foreign_keys

ROOT = Path(__file__).parents[2]
DEFAULTS = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"


def paths(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")


def test_verl_has_the_keys_that_errors_explain() -> None:
    known = {path.rpartition(".")[2] for path in paths(yaml.safe_load(DEFAULTS.read_text(encoding="utf-8")))}
    named = {name for name, entry in foreign_keys().items() if "verl" in entry["of"]}
    assert len(named) > 30
    assert sorted(named - known) == []


def test_verl_has_the_keys_of_the_page() -> None:
    known = set(paths(yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))))
    page = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| (`[^|]+) \|", page, re.M) for name in re.findall(r"`([\w.]+)`", row)}
    named -= {"AgentLoopBase"}  # a class
    assert len(named) > 20
    assert sorted(named - known) == []
