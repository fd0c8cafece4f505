"""Tests that the pages for users of other trainers name keys that exist."""

from __future__ import annotations

import re

import pytest
from generate import first_party_plugins, keys, sections
from pages import ROOT, Page

from rllm_core.run_file import foreign_keys


@pytest.mark.parametrize("name", ["from-trl", "from-verl", "memory", "faq"])
def test_keys_exist(name: str) -> None:
    found = list(sections(first_party_plugins()))
    known = {f"{path}.{key}" for path, _, model in found for key, _, _ in keys(model)}
    text = Page(ROOT / "docs" / f"{name}.md").text
    if "## Names" in text:
        rows = [line.split(" | ") for line in Page(ROOT / "docs" / f"{name}.md").section("Names").splitlines()]
        text = " ".join(row[1] for row in rows if len(row) > 2)
    prefixes = {path.partition(".")[0] for path, _, _ in found}
    named = {key for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", text) if key.partition(".")[0] in prefixes}
    assert named, "the page names no key"
    assert sorted(named - known) == []


def test_a_key_of_verl_in_a_run_file_is_answered_with_ours() -> None:
    rows = [line.split(" | ") for line in Page(ROOT / "docs" / "from-verl.md").section("Names").splitlines()]
    keys_of_verl = {key for row in rows for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", row[0])}
    names = {key.rpartition(".")[2] for key in keys_of_verl} - {"path", "merge"}  # which say nothing on their own
    assert len(names) > 20
    assert sorted(names - foreign_keys().keys()) == []
