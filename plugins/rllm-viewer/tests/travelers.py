"""Runs whose rollouts travel, and what arrived of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from local_runs import train

from rllm_core.plugins import PluginManager
from rllm_viewer.travel.exports import bring_in, export
from rllm_viewer.travel.fields import json_of, values
from rllm_viewer.travel.formats import FORMATS
from rllm_viewer.travel.selection import Filters, picked

AGENT = """
import json, os, urllib.request

TOOLS = [{"type": "function", "function": {"name": "sort", "description": "Sorts.", "parameters": {
    "type": "object", "properties": {"letters": {"type": "string"}}, "required": ["letters"]}}}]


def ask(base_url, messages):
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 6}).encode()
    answer = urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body))
    return json.load(answer)["choices"][0]["message"]


def solve(question, base_url):
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        answer = ask(base_url, messages)
        said = (answer.get("content") or "").strip()
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
    ask(base_url, [{"role": "user", "content": question + question}])
    return said
"""
SHORT = (
    "training.steps=1",
    "training.groups_per_step=2",
    "training.rollouts_per_group=4",
    "training.groups_kept_per_step=2",
    "training.validation_rollouts=2",
)


def trained(path: Path, plugins: PluginManager, workflow: str) -> Path:
    """Trains one step: a workflow, a calculator ``offered`` in prompts, or a program that is an ``agent``."""
    if workflow == "offered":
        return train(path, plugins, "calculator", *SHORT, "calculator.show_tools=true")
    if workflow != "agent":
        return train(path, plugins, workflow, *SHORT)
    path.mkdir()
    rows = [{"question": f"sort: {word}", "answer": "".join(sorted(word))} for word in ("dbca", "acbd", "bdca", "cadb")]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "agent.py").write_text(AGENT)
    files = {"function": f"{path / 'agent.py'}:solve", "train_file": str(path / "rows.jsonl")}
    more = {"reward": "exact_match", "hide_tools": True, "held_out_share": 0.0}
    keys = [f"agent.{name}={value}" for name, value in (files | more).items()]
    keys = [key.replace("=True", "=true") for key in keys]
    return train(path / "run", plugins, "agent", *SHORT, *keys)


def held(run: Path, name: str, filters: Filters = Filters()) -> dict[str, list[Any]]:  # noqa: B008 - frozen
    """Returns the values of each field that a format holds, in order."""
    found: dict[str, list[Any]] = defaultdict(list)
    for one in picked(run, filters):
        for field, value in values(one):
            if field in FORMATS[name].holds:
                found[field].append(plain(value))
    return dict(found)


def plain(value: Any) -> Any:
    """Returns a value as JSON data."""
    if not isinstance(value, str | dict) and hasattr(value, "__iter__") and not hasattr(value, "model_dump"):
        return [plain(part) for part in value]
    return json_of(value)


def exported(run: Path, out: Path, name: str, **filters: Any) -> dict[str, Any]:
    return export(run, out, FORMATS[name], Filters(**filters))


def imported(file: Path, folder: Path, name: str) -> dict[str, Any]:
    return bring_in(file, FORMATS[name], folder)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".json":
        return [json.loads(path.read_text(encoding="utf-8"))]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
