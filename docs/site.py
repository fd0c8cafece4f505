"""Adds the plugins' own pages and the notebooks, and links to them, to the site. A hook of mkdocs."""

from __future__ import annotations

import re
from pathlib import Path

from diagrams import DIAGRAMS
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import notebooks, rendered

ROOT = Path(__file__).parents[1]
PACKAGES = "packages"
# Pages, or folders of pages, that readers search for first, and those whose headings repeat a common word.
BOOST = {
    "install.md": 3.0,
    "python.md": 3.0,
    "my-code.md": 5.0,
    "memory.md": 2.0,
    "faq.md": 2.0,
    "benchmarks.md": 0.3,
    "compatibility.md": 0.5,
    "hooks/": 0.3,
}
_DIAGRAM = re.compile(rf'<p>(<img [^>]*/(?:{"|".join((*DIAGRAMS, "rooms"))})\.svg"[^>]*>)</p>')
_KEYS = re.compile(r"<table>\s*<thead>\s*<tr>\s*<th>key</th>\s*<th>type</th>.*?</table>", re.S)
_NOTEBOOK = re.compile(r"\.ipynb\)")
_LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]+)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds ``plugins/NAME/README.md`` as the page ``packages/NAME.md``, and each notebook as a page."""
    for readme in sorted(ROOT.glob("plugins/*/README.md")):
        text = readme.read_text(encoding="utf-8")
        files.append(File.generated(config, f"{PACKAGES}/{readme.parent.name}.md", content=text))
    for notebook in notebooks():
        markdown, pictures = rendered(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=markdown))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the plugins' pages to the navigation, so that a new plugin needs no line in ``mkdocs.yml``."""
    names = sorted(readme.parent.name for readme in ROOT.glob("plugins/*/README.md"))
    assert config.nav is not None
    config.nav.append({"Packages": [{name: f"{PACKAGES}/{name}.md"} for name in names]})
    return config


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Converts links to files of the repository and to notebooks to links within the site, and sets search boosts."""
    here = page.file.src_uri
    boost = BOOST.get(here) or BOOST.get(f"{Path(here).parent}/")
    if boost is not None:
        page.meta["search"] = {"boost": boost}
    below = Path("plugins", Path(here).stem) if here.startswith(f"{PACKAGES}/") else Path("docs", here).parent
    up = "../" * here.count("/")

    def moved(link: re.Match[str]) -> str:
        target = (ROOT / below / link["path"]).resolve().relative_to(ROOT)
        match target.parts:
            case ("docs", *rest):
                inside = "/".join(rest)
            case ("plugins", name, "README.md"):
                inside = f"{PACKAGES}/{name}.md"
            case ("README.md",):
                inside = "index.md"
            case _:
                return link[0]  # mkdocs warns that it leaves the site
        return f"]({up}{inside}{link['anchor'] or ''})"

    return _LINK.sub(moved, _NOTEBOOK.sub(".md)", markdown))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks diagrams and references of keys, which ``stylesheets/site.css`` lays out differently on a phone."""
    html = _DIAGRAM.sub(r'<div class="diagram">\1</div>', html)
    return _KEYS.sub(lambda table: f'<div class="keys">{table[0]}</div>', html)
