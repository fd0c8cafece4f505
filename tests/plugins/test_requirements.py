"""Tests which requirements of a distribution are found to be unmet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rllm_core.plugins import discovery
from rllm_core.plugins.requirements import Missing, unmet, unmet_closure


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two installed distributions: the first requires the second, which requires one that is not installed."""
    for name, requires in (("rllm-chain-one", "rllm_chain.two>=1"), ("rllm-chain-two", "rllm-not-there>=2")):
        info = tmp_path / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\nRequires-Dist: {requires}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_installed()
    yield
    forget_installed()


def forget_installed() -> None:
    discovery.installed_distributions.cache_clear()
    discovery.installed_versions.cache_clear()


@pytest.mark.usefixtures("chain")
def test_what_a_requirement_itself_lacks_is_found_in_the_closure_only() -> None:
    requires = ["rllm-chain-one"]
    assert unmet("mine", requires) == []
    assert unmet_closure("mine", requires) == [Missing("rllm-not-there>=2", None, "rllm-chain-two")]


@pytest.mark.usefixtures("chain")
def test_a_version_that_is_too_old_is_named() -> None:
    assert unmet("mine", ["rllm-chain-one>=1.5"]) == []
    [lack] = unmet("mine", ["rllm-chain-one>=1.6"])
    assert str(lack) == "mine needs rllm-chain-one>=1.6, but 1.5 is installed"
