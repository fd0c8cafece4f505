"""Modules that moved: importing one by its old name returns the new module and warns. Entries go in 0.3."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED: dict[str, str] = {
    "rllm_core.training.state": "rllm_core.events",
}
"""New names of modules by their old ones."""


class MovedModules:
    """Finds modules by their old names. Each is replaced by the new module, so that its classes exist only once."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Finds a module of `MOVED`."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to create the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the module by the one that it was moved to."""
        old = module.__name__
        warnings.warn(f"{old} is now {MOVED[old]}; it will be removed in rllm-core 0.3", DeprecationWarning, 2)
        sys.modules[old] = importlib.import_module(MOVED[old])


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.append(MovedModules())
