"""Small real runs of every kind, and single changes to their folders."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import OptimizerStep
from rllm_core.engine import EngineError
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_devkit import scripted

Lines = list[dict[str, Any]]
Edit = Callable[[Path], None]

SMALL = ("training.steps=6", "training.groups_per_step=4", "training.rollouts_per_group=4", "say_yes.turns=2",
         "training.validation_rollouts=10", "training.checkpoint_every_steps=2",
         "training.keep_checkpoints=3", "training.trajectories_per_step=8")  # fmt: skip
IN_FLIGHT = ("training.staleness_threshold=1", "training.partial_rollout=true")
LOSSY = ("rollout.max_attempts=1", "rollout.quarantine_after_groups=1", "say_yes.tasks=14")
WITHOUT = ("algorithm.filter_uniform_groups=true", "algorithm.refill_filtered_groups=false")
KINDS: dict[str, tuple[str, ...]] = {
    "synchronous": ("training.trajectories_per_step=16", "training.validate_every_steps=2"),
    "colocated": ("backend=scripted_colocated", "training.validate_every_steps=3"),
    "two groups": ("training.groups_kept_per_step=2", "training.trajectories_per_step=0"),
    "asynchronous": (*IN_FLIGHT, "training.trigger_parameter_sync_step=2", "algorithm.filter_uniform_groups=true"),
    "strict": (*IN_FLIGHT, "training.staleness=strict", "training.trajectories_per_step=5"),
    "streamed": (*IN_FLIGHT, "training.groups_per_forward_backward=1", "training.validation_rollouts=0"),
    "quarantine": (*LOSSY, "training.staleness_threshold=1", "training.trajectories_per_step=0"),
    "going without": (*WITHOUT, "training.trajectories_per_step=16"),
    "going without in flight": (*WITHOUT, *IN_FLIGHT, "training.trajectories_per_step=16"),
    "truncated": ("rollout.max_response_tokens=3",
                  'algorithm.filter_termination_reasons=["max_response_tokens_exceeded"]'),
    "spilled": (*IN_FLIGHT, "training.buffer_max_bytes=1", "training.buffer_spill=true"),
    "unmeasured": ("training.validation_rollouts=0", "training.checkpoint_every_steps=0"),
}  # fmt: skip
FAILING = ("synchronous", "asynchronous", "quarantine", "going without in flight")


def _fails_often(request: int) -> Exception | None:
    return EngineError("busy") if request % 23 == 0 else None


def train(
    folder: Path, *overrides: str, resume: bool = False, fails_at_step: int | None = None, often: bool = True
) -> None:
    """Trains on the scripted backend; expects `RunError` if the run is to fail."""
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    own = [override for override in overrides if not override.startswith("backend=")]
    backend = next((o.removeprefix("backend=") for o in overrides if o.startswith("backend=")), "scripted")
    config = load_run_config("say_yes", plugins, overrides=(*SMALL, *own), backend=backend)
    assembly = assemble(config, plugins)
    trained = assembly.backend.update_policy

    async def update_policy(step: OptimizerStep) -> Any:
        if step.step == fails_at_step:
            raise RunError("made to fail")
        return await trained(step)

    assembly.backend.update_policy = update_policy  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        script = scripted.Script(
            failure=_fails_often if often else None,
            latency_seconds=(lambda random: random.random() / 500) if config.training.staleness_threshold else None,
        )
        patch.setattr(scripted.ScriptedBackend, "script", script)
        try:
            asyncio.run(launch.train(assembly, folder, resume=resume, progress=Progress()))
        except RunError:
            assert fails_at_step is not None


def make(folder: Path, kind: str) -> None:
    """Makes a run of a kind in `KINDS`, a failed run (``failed``) or a resumed run (``resumed KIND``)."""
    if kind == "failed":
        train(folder, *KINDS["synchronous"], fails_at_step=4)
    elif kind.startswith("resumed "):
        overrides = KINDS[kind.removeprefix("resumed ")]
        train(folder, *overrides, fails_at_step=4)
        # The number of trajectories kept per step may change between two launches.
        train(folder, *overrides, "training.trajectories_per_step=6", resume=True)
        assert (folder / "lost/0/events.jsonl").exists()
    else:
        train(folder, *KINDS[kind], often=kind in FAILING)


# --------------------------------------------------------------------------------------------------------------------
# Edits


@contextmanager
def lines(folder: Path, name: str) -> Iterator[Lines]:
    """Yields the objects of a JSON Lines file; writes them back afterwards."""
    path = folder / name
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    yield objects
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in objects))


@contextmanager
def whole(folder: Path, name: str) -> Iterator[Any]:
    """Yields a JSON file and writes it back afterwards; ``manifest.json`` means the newest manifest."""
    path = max(folder.glob("checkpoints/*/manifest.json")) if name == "manifest.json" else folder / name
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content, indent=1) + "\n")


def changed(value: Any) -> Any:
    """Returns a different value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value + "x" if isinstance(value, str) else {**value, "x": 1} if isinstance(value, dict) else [*value, 1]


def field(name: str, *path: str | int, to: Any = changed) -> Edit:
    """Returns an edit that replaces a field of a JSON file; ``to`` is the new value, or a function of the old one."""

    def edit(folder: Path) -> None:
        with whole(folder, name) as content:
            _set(content, path, to)

    return edit


def line(name: str, *path: str | int, at: Callable[[Any], bool] | int = -1, to: Any = changed) -> Edit:
    """Returns an edit of a field in one line: line number ``at``, or the last line that satisfies ``at``."""

    def edit(folder: Path) -> None:
        with lines(folder, name) as objects:
            _set(objects[_at(objects, at)], path, to)

    return edit


def event(name: str, *path: str | int, to: Any = changed, where: Callable[[Any], bool] = lambda e: True) -> Edit:
    """Returns an edit that replaces a field of the last event with that name."""
    return line("events.jsonl", *path, at=lambda e: e["event"] == name and where(e), to=to)


def without(name: str, at: Callable[[Any], bool] | int) -> Edit:
    """Returns an edit that removes a line."""

    def edit(folder: Path) -> None:
        with lines(folder, name) as objects:
            del objects[_at(objects, at)]

    return edit


def twice(name: str, at: Callable[[Any], bool] | int) -> Edit:
    """Returns an edit that duplicates a line."""

    def edit(folder: Path) -> None:
        with lines(folder, name) as objects:
            objects.insert(_at(objects, at), objects[_at(objects, at)])

    return edit


def swapped(name: str, at: Callable[[Any], bool] | int) -> Edit:
    """Returns an edit that swaps a line with the next one."""

    def edit(folder: Path) -> None:
        with lines(folder, name) as objects:
            first = _at(objects, at)
            objects[first], objects[first + 1] = objects[first + 1], objects[first]

    return edit


def torn(name: str) -> Edit:
    """Returns an edit that cuts off the end of the last line."""

    def edit(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-5])

    return edit


def _at(objects: Lines, at: Callable[[Any], bool] | int) -> int:
    if isinstance(at, int):
        return at % len(objects)
    return max(number for number, content in enumerate(objects) if at(content))


def _set(content: Any, path: tuple[str | int, ...], to: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = to(content[path[-1]]) if callable(to) else to
