"""Tests pages that show a package: its files are written, installed and checked as described."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from following import followed
from pages import PAGES, Page

from rllm_core.plugins.discovery import GROUP


def project(page: Page) -> str | None:
    """Returns the ``pyproject.toml`` on a page."""
    shown = [block.text for block in page.blocks if block.language == "toml" and "project" in tomllib.loads(block.text)]
    assert len(shown) <= 1, f"{page.name} shows two packages"
    return shown[0] if shown else None


WITH_PACKAGE = [page for page in PAGES if project(page) is not None]


def commands(page: Page, plugin: str, module: str) -> list[str]:
    """Returns the commands about the package, in the order of the page."""
    lines = [line for block in page.blocks if block.language == "console" for line in block.text.splitlines()]
    about = rf"\$ (touch {module}/\S+|pip install -e \.|rllm-core plugins (show|check) {plugin}\b.*)"
    return [line.removeprefix("$ ") for line in lines if re.fullmatch(about, line)]


def test_pages_that_show_a_package() -> None:
    names = {page.name for page in WITH_PACKAGE}
    assert names >= {"docs/plugins.md", "docs/writing-an-algorithm.md", "docs/porting-from-rllm.md"}
    for page in PAGES:
        assert (page in WITH_PACKAGE) == ("[project]" in page.text), f"{page.name} has a package in another block"


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PACKAGE, ids=lambda page: page.name)
def test_the_package_of_a_page_is_installed_and_checked(
    page: Page, environment: Mapping[str, str], tmp_path: Path
) -> None:
    text = project(page)
    assert text is not None
    [(plugin, module)] = tomllib.loads(text)["project"]["entry-points"][GROUP].items()
    folder = tmp_path / "package"
    for block in page.blocks:
        if block.file is not None and block.file.partition("/")[0] in (module, "pyproject.toml"):
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            assert not path.exists(), f"{page.name} shows {block.file} twice"
            path.write_text(block.text, encoding="utf-8")
    wanted = commands(page, plugin, module)
    check = f"rllm-core plugins check {plugin} --strict"
    assert "pip install -e ." in wanted
    assert check in wanted
    alone = {**environment, "RLLM_PLUGINS": f"{plugin},devkit"}  # a check probes all that are installed
    printed = {command: followed(command, folder, alone)[0] for command in wanted}[check]
    assert re.search(r": contract passed \(.*\); packaging: passed$", printed)
    assert len(re.findall(r" result +seen$", printed, re.M)) > 2, "it provides something"
