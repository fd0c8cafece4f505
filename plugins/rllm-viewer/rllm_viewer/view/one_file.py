"""Writes part of a run to a single file, the page with its data, which opens from disk without a server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path

from rllm_core.errors import ConfigError
from rllm_core.run_folder.journal import write_whole, writing
from rllm_viewer.view import assets
from rllm_viewer.view.answers import RequestHandler
from rllm_viewer.view.facts import ListedGroup
from rllm_viewer.view.viewed_run import ViewedRun, encoded

MAX_BYTES = 50_000_000
MAX_RAW_BYTES = 400_000_000
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (async function|function|class|const) (\w+)", re.MULTILINE)


def write(run: ViewedRun, groups: Sequence[ListedGroup], file: Path) -> int:
    """Writes groups of a run into a copy of the page, and returns the size of the file in bytes.

    Raises:
        ConfigError: If the file would be too large, or cannot be written.
    """
    content = _page(run.name, _data(run, groups))
    with writing(file):
        write_whole(file, content)
    return len(content)


def _data(run: ViewedRun, groups: Sequence[ListedGroup]) -> str:
    """Returns the answers to all requests that the page may send, compressed, as text."""
    answers = RequestHandler([run])
    paths = ["/api/runs", "/api/run/0", "/api/run/0/steps"]
    paths += [f"/api/run/0/timing/{step}" for step in sorted({group.step for group in groups})]
    for group in groups:
        paths.append(f"/api/run/0/group/{group.id}")
        paths += [f"/api/run/0/tokens/{group.id}/{position}" for position in range(len(group.rollouts or ()))]
    whole = run.index.changes(0, 0)
    whole.rows, whole.read, whole.broken = list(groups), whole.size, []
    parts = [b'{"/api/run/0/groups":', encoded(whole)]
    size = 0
    for path in paths:
        answer = answers.answer(path, {})
        size += len(answer)
        parts += [b',"', path.encode(), b'":', answer]
        if size > MAX_RAW_BYTES:
            break
    packed = gzip.compress(b"".join([*parts, b"}"]), 6, mtime=0)
    text = base64.b64encode(packed).decode()
    if len(text) > MAX_BYTES or size > MAX_RAW_BYTES:
        raise ConfigError(
            f"{len(groups)} groups are more than {MAX_BYTES // 1_000_000} MB as a page; choose fewer with --step, "
            "--group or --filter"
        )
    return text


def _page(name: str, data: str) -> str:
    style, script = assets.FILES["/style.css"].content.decode(), bundle()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{html.escape(name)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This page shows a run with JavaScript, which is switched off.</noscript>\n"
        f'<div id="app"></div>\n<script type="text/plain" id="data">{data}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def bundle() -> str:
    """Returns the page's modules as one script, each in a function of its own."""
    done: dict[str, str] = {}
    _add("app", done)
    return "\n".join(["(() => {", '"use strict";', *done.values(), "})();"])


def _add(name: str, done: dict[str, str]) -> None:
    """Adds a module after the modules that it imports."""
    source = assets.FILES[f"/{name}.js"].content.decode()
    for imported in _IMPORT.finditer(source):
        if imported[2] not in done:
            _add(imported[2], done)
    exported = ", ".join(match[2] for match in _EXPORT.finditer(source))
    body = _IMPORT.sub(lambda match: f"const {{{match[1]}}} = from_{match[2]};\n", source)
    body = _EXPORT.sub(r"\1 \2", body)
    done[name] = f"const from_{name} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
