"""Names the plugins of an earlier launch that are no longer installed, when a run file in a run folder needs one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rllm_core.errors import PluginError
from rllm_core.plugins import PluginManager


@contextmanager
def naming_lost_plugins(target: str, plugins: PluginManager) -> Iterator[None]:
    """Adds their names and versions to a PluginError, whose author knows only that a backend or workflow is missing.

    ``target`` may be the run file of a run folder, or anything else.
    """
    try:
        yield
    except PluginError as error:
        lost = _lost(Path(target).with_name("plugins.json"), plugins) if target.endswith("run.toml") else []
        if lost:
            error.args = (f"{error}; the run's last launch also had {', '.join(lost)}, not installed here",)
        raise


def _lost(launches: Path, plugins: PluginManager) -> list[str]:
    try:
        had = json.loads(launches.read_text(encoding="utf-8"))[-1]["plugins"]
    except (OSError, ValueError, LookupError, TypeError):  # no run folder, or a damaged one: other code reports that
        return []
    names = {info.name for info in plugins.plugins()}
    return [label.strip() or name for name, label in had.items() if name not in names]
