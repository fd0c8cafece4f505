"""Imports tracker libraries by name, so that a missing library is a one-line error."""

from __future__ import annotations

import importlib
from typing import Any

from rllm_core.errors import PluginError
from rllm_core.plugins.requirements import pip_install


def library(module: str, *, tracker: str) -> Any:
    """Imports a module of a tracker's library.

    Args:
        module: Full name of the module.
        tracker: Name of the tracker, and of the extra that installs its library.

    Raises:
        PluginError: If the module is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        mend = pip_install(f"rllm-trackers[{tracker}]")
        raise PluginError(f"tracker {tracker!r} needs {error.name}, which is not installed: {mend}") from error
