"""The libraries behind the trackers: imported by name, so that the one that was not installed is one line to read."""

from __future__ import annotations

import importlib
from typing import Any

from rllm_core.errors import PluginError
from rllm_core.requirements import pip_install


def library(module: str, *, tracker: str) -> Any:
    """Import a module of a tracker's library.

    Args:
        module: Its full name.
        tracker: Name of the tracker, and of the extra that installs what it needs.

    Raises:
        PluginError: If it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        mend = pip_install(f"rllm-trackers[{tracker}]")
        raise PluginError(f"tracker {tracker!r} needs {error.name}, which is not installed: {mend}") from error
