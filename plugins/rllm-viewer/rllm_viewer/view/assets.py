"""The files of the page, served unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# The page loads nothing from other hosts, and text can become neither a script nor an element.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass(frozen=True)
class File:
    """A file of the page."""

    content_type: str
    content: bytes


def _files() -> dict[str, File]:
    folder = resources.files("rllm_viewer.view") / "page"
    found = {}
    for file in folder.iterdir():
        kind = TYPES.get(f".{file.name.rpartition('.')[2]}")
        if kind is not None:
            found[f"/{file.name}"] = File(kind, file.read_bytes())
    page = found.pop("/index.html")
    return {**found, "/": File(page.content_type, _preloaded(page.content, found))}


def _preloaded(page: bytes, files: Mapping[str, File]) -> bytes:
    """Returns the page with a preload of every module, so that a browser requests them all at once."""
    names = sorted(path[1:] for path, file in files.items() if file.content_type == TYPES[".js"])
    links = "".join(f'<link rel="modulepreload" href="{name}">\n    ' for name in names)
    return page.replace(b"<script", links.encode() + b"<script", 1)


FILES = _files()
"""Files of the page by their path on the server."""
