"""Generates the upper part of ``hooks/NAME.md`` from the hook's spec and the record it returns."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rllm_core import hookspecs, providers

FOLDER = Path(__file__).parent / "hooks"
MARKER = (
    "<!-- `make docs-reference` generates everything above this line from the hook spec; write below it by hand. -->\n"
)
SPECS: dict[str, Callable[..., Any]] = {
    name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, f"{hookspecs.PROJECT}_spec")
}
RECORDS = {kind.hook: kind for kind in providers.KINDS}
STATE_HOOKS = ("save_plugin_state", "load_plugin_state")
REMARK_HOOKS = ("remarks", "closing_lines")
CONTRACT_PAGES: dict[str, str] = {
    "backends": "backend",
    "rollout_engines": "engine",
    "parsers": "parser",
    "workflows": "workflow",
    "rollout_hosts": "rollout-host",
    "trackers": "tracker",
    "advantage_estimators": "estimator",
    "policy_losses": "loss",
    "corrections": "correction",
    "group_scorers": "group-scorer",
    "task_samplers": "task-sampler",
    "reward_functions": "reward-function",
    "sandboxes": "sandbox",
}

_PROVIDER_ROWS = {
    "when": "at most once per process, together with the plugin's other provider hooks, when a provider is first "
    "listed or selected",
    "order": "records have no order: two with the same name are an error that names both packages",
    "raises": "the whole plugin is `broken`: none of its records can be selected, and selecting one is a fatal error "
    "with the cause",
    "async": "no, and an `async def` marks the plugin as broken",
    "process": "any; a plugin may be loaded in several processes at once",
}
_OBSERVER_ROWS = {
    "order": "one plugin after another, by name; at most one call per plugin at a time",
    "raises": "reported with the plugin's name and counted; the next plugin is called and the run continues. A call "
    "over 10 seconds switches the plugin's observers off for the rest of the run",
    "async": "an `async def` is awaited on the event loop; a plain function runs in its plugin's worker thread",
    "process": "the driver only",
}


def signature(name: str) -> str:
    """``name(argument, ...)``."""
    return f"{name}({', '.join(inspect.signature(SPECS[name]).parameters)})"


def page(name: str, written: str) -> str:
    """The page of a hook, with the hand-written part of ``written``."""
    _, found, below = written.partition(MARKER)
    if not found:
        raise SystemExit(f"hooks/{name}.md lacks the line {MARKER!r}")
    parts = [f"# {signature(name)}", _text(SPECS[name]), _table(["question", "answer"], _answers(name))]
    if name in RECORDS:
        parts += [_text(RECORDS[name]), _table(["field", "meaning"], _fields(RECORDS[name]))]
    else:
        parts.append(_table(["argument", "type"], _arguments(name)))
    return "\n\n".join(parts) + f"\n\n{MARKER}{below}"


def _answers(name: str) -> Iterator[tuple[str, str]]:
    if name not in RECORDS:
        of_state = "a JSON object or None" if name == "save_plugin_state" else "ignored"
        returned = "a list of lines, or None" if name in REMARK_HOOKS else of_state
        raises = _OBSERVER_ROWS["raises"].replace("10 seconds", f"{60 if name == 'closing_lines' else 10} seconds")
        yield from {"returns": returned, **_OBSERVER_ROWS, "raises": raises}.items()
        return
    record = RECORDS[name]
    yield "returns", f"an iterable of `rllm_core.providers.{record.__name__}`; a generator works too"
    yield from _PROVIDER_ROWS.items()
    if name in CONTRACT_PAGES:
        yield "contract", f"[rules and checks](../contracts/{CONTRACT_PAGES[name]}.md)"


def _fields(record: type[providers.Provider]) -> Iterator[tuple[str, str]]:
    documented = {**attributes(inspect.getdoc(providers.Provider) or ""), **attributes(inspect.getdoc(record) or "")}
    for field in dataclasses.fields(record):
        required = field.default is dataclasses.MISSING
        yield f"`{field.name}`", documented[field.name] + ("" if required else f" Default: `{field.default!r}`.")


def _arguments(name: str) -> Iterator[tuple[str, str]]:
    for argument in inspect.signature(SPECS[name]).parameters.values():
        link = {"TrainerState": "[`TrainerState`](../hooks.md#the-state)"}.get(argument.annotation)
        yield f"`{argument.name}`", link or f"`{argument.annotation}`"


def _text(documented: object) -> str:
    """The paragraphs of a docstring before its first section, as Markdown."""
    text = (inspect.getdoc(documented) or "").partition("\n\nAttributes:")[0]
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def attributes(doc: str) -> dict[str, str]:
    """The ``Attributes:`` of a Google-style docstring, by name."""
    _, _, block = doc.partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", block, re.M)
    return {name: " ".join(text.replace("``", "`").split()) for name, text in found}


def _table(head: list[str], rows: Iterator[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "| --- | --- |"]
    return "\n".join(lines + [f"| {one} | {other} |" for one, other in rows])
