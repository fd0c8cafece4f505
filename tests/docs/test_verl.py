"""Tests the guide to backend ``verl`` against its sources, which need not be importable here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pages import ROOT, Page, says

GUIDE = Page(ROOT / "docs" / "verl.md")
SOURCES = sorted((ROOT / "plugins" / "rllm-verl" / "rllm_verl").glob("*.py"))


def constant(path: Path, name: str) -> tuple[str, ...]:
    [found] = [
        node.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [name]
    ]
    value: tuple[str, ...] = ast.literal_eval(found)
    return value


MESSAGES = list(GUIDE.rows("Troubleshooting"))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_is_explained_exists(message: str) -> None:
    assert says(SOURCES, message)


def test_the_environment_that_workers_get_is_that_of_the_code() -> None:
    source = next(path for path in SOURCES if path.name == "cluster.py")
    [paragraph] = re.findall(r"^\*\*Environment\.\*\*(.*?)\. Anything else", GUIDE.text, re.M | re.S)
    assert set(re.findall(r"`([A-Z_]+)`", paragraph)) == {
        *constant(source, "FORWARDED"),
        *constant(source, "FORWARDED_PREFIXES"),
    }


def test_every_key_that_is_named_exists() -> None:
    from rllm_verl.config import VerlConfig

    named = set(re.findall(r"`verl\.(\w+)", GUIDE.text))
    assert named
    assert named <= set(VerlConfig.model_fields)
