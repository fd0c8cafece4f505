"""Generates the tables of ``worker-protocol.md`` from the messages in `rllm_core.hosts.wire`."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from hook_pages import attributes
from msgspec import NODEFAULT, UNSET, Struct, UnsetType

from rllm_core.hosts import wire

PAGE = Path(__file__).parent / "worker-protocol.md"
MARKER = "<!-- Generated from `rllm_core.hosts.wire` by `make docs-reference`; edit the classes there. -->\n"
FROM_RUN: tuple[type[Struct], ...] = get_args(wire.FromRun)
FROM_WORKER: tuple[type[Struct], ...] = get_args(wire.FromWorker)
PARTS = (
    wire.SampledStep,
    wire.Fork,
    wire.ReturnedTrajectory,
    wire.ReturnedStep,
    wire.TimedCall,
    wire.FetchedTask,
)
PLAIN = {int: "integer", str: "text", bytes: "binary", bool: "true or false", float: "number", type(None): "nil"}


def tag(message: type[Struct]) -> str:
    """Its ``type`` on the wire."""
    return str(message.__struct_config__.tag)


def fields(message: type[Struct]) -> Iterator[tuple[str, str, str, str]]:
    """Yields name, type, default and meaning of every field."""
    documented = {}
    for described in reversed(message.__mro__):  # fields of base classes, too
        documented |= attributes(inspect.getdoc(described) or "")
    hints = typing.get_type_hints(message)
    names, defaults = message.__struct_fields__, message.__struct_defaults__
    required = len(names) - len(defaults)
    for at, name in enumerate(names):
        default = defaults[at - required] if at >= required else NODEFAULT
        yield name, kind(hints[name]), _default(default), _linked(documented[name])


def kind(annotation: Any) -> str:
    """A type in words."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind(one) for one in get_args(annotation) if one is not UnsetType]
        return (", or " if kinds[0].startswith("array") else " or ").join(kinds)
    if get_origin(annotation) is list:
        return f"array: {kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "map"
    if inspect.isclass(annotation) and issubclass(annotation, Struct):
        return f"[`{tag(annotation)}`](#{tag(annotation)})"
    return PLAIN[annotation]


def _default(default: Any) -> str:
    if default is NODEFAULT:
        return "required"
    if default is UNSET:
        return "left out"
    if callable(getattr(default, "factory", None)):
        return "empty"
    return {"None": "nil", "False": "`false`", "''": '`""`'}.get(repr(default), f"`{default!r}`".replace("'", '"'))


def _linked(text: str) -> str:
    """Names messages as on the wire."""
    for message in (*FROM_RUN, *FROM_WORKER, *PARTS):
        text = text.replace(f"`{message.__name__}`", f"`{tag(message)}`")
    return text.replace(" None", " nil")


def reference() -> str:
    """The part of the page below the marker."""
    groups = {"From the run": FROM_RUN, "From the worker": FROM_WORKER, "Parts of messages": PARTS}
    parts = []
    for heading, messages in groups.items():
        parts.append(f"## {heading}")
        for message in messages:
            summary = (inspect.getdoc(message) or "").partition("\n\nAttributes:")[0].replace("``", "`")
            rows = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in fields(message)]
            table = ["| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
            parts.append(f"### `{tag(message)}`\n\n{_linked(summary)}")
            parts.append("\n".join(table) if rows else "It has no fields.")
    return "\n\n".join(parts) + "\n"


def page(written: str) -> str:
    """The complete page, with its hand-written part."""
    above, found, _ = written.partition(MARKER)
    if not found:
        raise SystemExit(f"worker-protocol.md lacks the line {MARKER!r}")
    return f"{above}{MARKER}\n{reference()}"
