"""Old name of rllm-devkit: ``rllm_core.testing.scripted`` is now ``rllm_devkit.scripted``. To be removed in 0.3."""

from __future__ import annotations

import importlib.util

from rllm_core.moved import moved_names

if importlib.util.find_spec("rllm_devkit") is None:
    raise ImportError("rllm_core.testing has moved to rllm-devkit; install it with: pip install rllm-devkit")

__path__: list[str] = []  # makes it a package, so that its submodules can be imported
__getattr__ = moved_names(__name__)
