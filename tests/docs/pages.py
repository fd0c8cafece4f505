"""Parses the documentation pages."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ((?:[\w-]+/)*[\w-]+\.(?:py|toml))\b")


@dataclass(frozen=True)
class Block:
    """Fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """Path from the comment in its first line, if it has one."""
        found = _FILE.match(self.text)
        return found[1] if found else None


@dataclass(frozen=True)
class Page:
    """Page of the documentation."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        return [Block(language, text) for language, text in _FENCE.findall(self.text)]

    @property
    def prose(self) -> str:
        return _FENCE.sub("", self.text)

    @property
    def anchors(self) -> set[str]:
        """Anchors of its headings, formed as code hosts do."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @property
    def commands(self) -> list[str]:
        """Every ``rllm-core`` command in shell blocks, without comments and variables."""
        lines = []
        for block in self.blocks:
            if block.language == "sh":
                lines += block.text.splitlines()
            elif block.language == "console":
                lines += [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        return _bare(lines)

    @property
    def named_commands(self) -> list[str]:
        """Commands in the prose, which may leave out an argument."""
        return _bare(re.findall(r"`((?:\w+=\S* )*rllm-core [^`]*)`", self.prose))

    def section(self, heading: str) -> str:
        """Returns the text below a heading, up to the next heading of its level or above."""
        found = re.search(rf"^(#+) {re.escape(heading)}$", self.text, re.M)
        assert found, f"{self.name} has no heading {heading!r}"
        rest = self.text[found.end() :]
        after = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
        return rest[: after.start()] if after else rest

    def rows(self, heading: str) -> dict[str, list[str]]:
        """Returns the first table below a heading: the names in the first column, with the other cells of their row."""
        table = re.search(r"(?:^\|.*\n)+", self.section(heading), re.M)
        assert table, f"{self.name} has no table below {heading!r}"
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]
        return {name: row[1:] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def _bare(lines: Sequence[str]) -> list[str]:
    shown = (re.sub(r"^(\w+=\S* )+", "", re.split(" [|#] ?", line)[0].strip()) for line in lines)
    return [line for line in shown if line.startswith("rllm-core")]


PAGES = [
    Page(path) for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md") for path in sorted(ROOT.glob(pattern))
]


def write_files(page: Page, folder: Path) -> list[str]:
    """Writes the blocks of a page that are files; returns the names of the modules among them."""
    files = {block.file: block.text for block in page.blocks if block.file}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    modules = [name.removesuffix(".py").removesuffix("/__init__") for name in files if name.endswith(".py")]
    return [module.replace("/", ".") for module in modules]


@cache
def texts(path: Path) -> tuple[str, ...]:
    """Returns every string of a module, with ``...`` for each inserted value."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return tuple(found)


def says(sources: Sequence[Path], message: str) -> bool:
    """Returns whether a module can print a message in which ``...`` stands for the variable parts."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.S)
    return any(pattern.search(text) for path in sources for text in texts(path))


def exists(name: str) -> bool:
    """Returns whether a dotted path names a module or one of its members.

    Reads the source of a plugin module whose libraries are not installed here.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            for source in ROOT.glob(f"plugins/*/{'/'.join(parts[:length])}.py"):
                return _defines(ast.parse(source.read_text(encoding="utf-8")), parts[length:])
            continue
        for part in parts[length:]:
            fields = {*getattr(found, "__dataclass_fields__", ()), *getattr(found, "model_fields", ())}
            if not hasattr(found, part) and part not in fields:
                return False
            found = getattr(found, part, None)
        return True
    return False


def _defines(node: ast.AST, path: Sequence[str]) -> bool:
    if not path:
        return True
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, kinds) and child.name == path[0])
    return any(_defines(child, path[1:]) for child in inner)
