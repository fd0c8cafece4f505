"""Tests the built site: strict, complete, and readable from disk without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import searching
from notebooks import notebooks
from pages import PAGES, ROOT

pytestmark = pytest.mark.slow

# What a browser fetches by itself. Links in the text are followed by the reader.
FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("link", "href"),
    ("object", "data"),
}


class Tags(HTMLParser):
    """Addresses, ids and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if (tag, name) in FETCHED:
                self.fetched.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)
            elif name == "id":
                self.ids.add(value)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(source / "mkdocs.yml"), "-d", str(site)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def tags(site: Path) -> dict[Path, Tags]:
    return {path: Tags(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


def addresses(tags: dict[Path, Tags]) -> Iterator[tuple[Path, str]]:
    for page, found in tags.items():
        for address in (*found.fetched, *found.links):
            yield page, address


def test_every_page_is_in_it(tags: dict[Path, Tags], site: Path) -> None:
    sources = {page.path.relative_to(ROOT) for page in PAGES}
    expected = {path.relative_to("docs").with_suffix(".html") for path in sources if path.parts[0] == "docs"}
    expected |= {Path("packages", path.parts[1] + ".html") for path in sources if path.parts[0] == "plugins"}
    expected |= {Path("notebooks", f"{notebook.stem}.html") for notebook in notebooks()}
    assert {page.relative_to(site) for page in tags} == expected


def test_a_browser_fetches_nothing_from_elsewhere(tags: dict[Path, Tags], site: Path) -> None:
    assert sum(len(found.fetched) for found in tags.values()) > len(tags)
    outside = [(page.name, one) for page, found in tags.items() for one in found.fetched if urlsplit(one).netloc]
    assert outside == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", styles) == []
    inline = "".join(re.findall(r"<style>.*?</style>", "".join(page.read_text() for page in tags), re.S))
    assert "//" not in inline


def test_links_lead_somewhere_on_disk(tags: dict[Path, Tags]) -> None:
    for page, address in addresses(tags):
        parts = urlsplit(address)
        if parts.scheme:
            assert parts.scheme == "https", (page.name, address)
            continue
        assert not parts.path.startswith("/"), (page.name, address)
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        assert target.is_file(), (page.name, address)
        if parts.fragment and target in tags:
            assert unquote(parts.fragment) in tags[target].ids, (page.name, address)


def test_the_search_has_every_page_and_needs_no_server(tags: dict[Path, Tags], site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    found = {Path(entry["location"].partition("#")[0]) for entry in json.loads(index.partition(" = ")[2])["docs"]}
    assert {page.relative_to(site) for page in tags} - {Path("index.html")} <= found
    for page in tags.values():
        assert any(source.endswith("iframe-worker.js") for source in page.fetched)


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("install", "install.html"),
        ("LoRA", "faq.html"),
        ("lora rank", "run-file/local.html"),
        ("KL", "faq.html"),
        ("kl", "run-file/algorithm.html"),
        ("out of memory", "memory.html"),
        ("Python", "python.html"),
        ("own reward", "my-code.html"),
        ("reward function", "my-code.html"),
        ("wandb", "trackers.html"),
    ],
)
def test_a_search_finds_the_page_among_the_first_three(query: str, page: str, site: Path) -> None:
    assert page in searching.index(site).search(query)[:3]


def test_each_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "docs", source / "docs")
    for path in (ROOT / "mkdocs.yml", *ROOT.glob("plugins/*/README.md")):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    page = source / "docs" / "concepts.md"
    lost = "[lost](nowhere.md) [lost](cli.md#no-such-heading)"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{lost}\n", encoding="utf-8")
    done = build(source, tmp_path / "site")
    assert done.returncode == 1
    warnings = re.findall("^WARNING.*", done.stderr, re.M)
    assert len(warnings) == 2, "a warning fails the build, and each link has one"
    for target in ("nowhere.md", "no-such-heading"):
        assert any("concepts.md" in warning and target in warning for warning in warnings)
