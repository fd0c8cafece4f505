"""Forwards to rllm-devkit: ``rllm_core.testing.scripted`` is now ``rllm_devkit.scripted``. To be removed in 0.3."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

if importlib.util.find_spec("rllm_devkit") is None:
    raise ImportError("rllm_core.testing has moved to rllm-devkit; install it with: pip install rllm-devkit")

__path__: list[str] = []  # makes it a package, so that its submodules can be imported

_RENAMED = {"plugin": "rllm_devkit.scripted_plugin", "probe": "rllm_devkit.checks.engine_probe"}


class _Forwarding(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces submodules by the modules of rllm-devkit, so that their classes exist only once."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == __name__ and _moved_to(name) is not None else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        replacement = _moved_to(name.rpartition(".")[2])
        assert replacement is not None
        _warn(name, replacement)
        sys.modules[name] = importlib.import_module(replacement)


def _moved_to(name: str) -> str | None:
    modules = [_RENAMED[name]] if name in _RENAMED else [f"rllm_devkit.{name}", f"rllm_devkit.checks.{name}"]
    return next((module for module in modules if importlib.util.find_spec(module) is not None), None)


def _warn(name: str, replacement: str) -> None:
    message = f"{name} is deprecated and will be removed in rllm-core 0.3; use {replacement} (pip install rllm-devkit)"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def __getattr__(name: str) -> Any:
    for module in ("rllm_devkit.checks", "rllm_devkit.scripted"):
        found = importlib.import_module(module)
        if not name.startswith("_") and hasattr(found, name):
            _warn(f"{__name__}.{name}", f"{module}.{name}")
            globals()[name] = getattr(found, name)  # warn once
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.meta_path.append(_Forwarding())
