"""Modules and names that moved: an old name still returns the object, and warns. To be removed in 0.3."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CHECKS = (
    "algorithms", "answers", "backend_probe", "backends", "check_names", "completions", "drift", "engines", "losses",
    "parsers", "provided", "sandboxes", "trackers", "watch", "workflow_faults", "workflow_probe", "workflows",
)  # fmt: skip
RECORDS = (
    "AdvantageEstimator", "Backend", "Command", "Correction", "Engine", "Parser", "PolicyLoss", "RewardFunction",
    "Sandbox", "Tracker", "Workflow",
)  # fmt: skip

MOVED: dict[str, str] = {
    "rllm_core.training.state": "rllm_core.events",
    "rllm_core.algorithms.advantages.batch": "rllm_core.builtin.estimators.batch",
    "rllm_core.algorithms.advantages.imitation": "rllm_core.builtin.estimators.without_rewards",
    "rllm_core.algorithms.advantages.outcome": "rllm_core.builtin.estimators.outcome",
    "rllm_core.algorithms.advantages.precomputed": "rllm_core.builtin.estimators.without_rewards",
    "rllm_core.algorithms.advantages.turns": "rllm_core.builtin.estimators.turns",
    "rllm_core.algorithms.pieces": "rllm_core.assembly.components",
    "rllm_core.algorithms.selection": "rllm_core.assembly.algorithm",
    "rllm_core.algorithms.support": "rllm_core.assembly.support",
    "rllm_core.blame": "rllm_core.plugins.blame",
    "rllm_core.cli.probe": "rllm_core.plugins.probe",
    "rllm_core.discovery": "rllm_core.plugins.discovery",
    "rllm_core.distillation.opening": "rllm_core.assembly.teacher",
    "rllm_core.hosts.completer": "rllm_core.hosts.remote_completer",
    "rllm_core.hosts.played": "rllm_core.hosts.run_side_rollout",
    "rllm_core.hosts.running": "rllm_core.hosts.worker_side_rollout",
    "rllm_core.hosts.workers": "rllm_core.hosts.worker_handle",
    "rllm_core.loading": "rllm_core.plugins.loading",
    "rllm_core.requirements": "rllm_core.plugins.requirements",
    "rllm_core.sections": "rllm_core.plugins.sections",
    "rllm_core.surroundings": "rllm_core.plugins.surroundings",
    "rllm_core.third_party": "rllm_core.third_party_calls",
    "rllm_core.training.checkpoint": "rllm_core.run_folder.checkpoint",
    "rllm_core.training.coordinator": "rllm_core.training.staleness_limit",
    "rllm_core.training.deadlines": "rllm_core.limits.timeouts",
    "rllm_core.training.difficulty": "rllm_core.run_folder.difficulty",
    "rllm_core.training.engines": "rllm_core.assembly.engines",
    "rllm_core.training.evaluation": "rllm_core.runs.evaluation",
    "rllm_core.training.first_failures": "rllm_core.run_folder.first_failures",
    "rllm_core.training.guard": "rllm_core.limits.guard",
    "rllm_core.training.guard_process": "rllm_core.limits.guard_process",
    "rllm_core.training.journal": "rllm_core.run_folder.journal",
    "rllm_core.training.launch": "rllm_core.runs.launch",
    "rllm_core.training.metrics": "rllm_core.run_folder.metrics",
    "rllm_core.training.progress": "rllm_core.run_folder.progress",
    "rllm_core.training.reporting": "rllm_core.run_folder.reporting",
    "rllm_core.training.report": "rllm_viewer.plot",
    "rllm_core.training.run_dir": "rllm_core.run_folder.folder",
    "rllm_core.training.running": "rllm_core.limits.running",
    "rllm_core.training.shared_timer": "rllm_core.limits.shared_timer",
    "rllm_core.training.signals": "rllm_core.runs.signals",
    "rllm_core.training.slots": "rllm_core.limits.slots",
    "rllm_core.training.starting": "rllm_core.runs.starting",
    "rllm_core.training.tasks": "rllm_core.assembly.tasks",
    "rllm_core.training.trackers": "rllm_core.tracker",
    "rllm_core.training.verify": "rllm_viewer.verify",
    **{f"rllm_core.testing.{name}": f"rllm_devkit.{name}" for name in ("contracts", "disk", "faults", "scripted")},
    **{f"rllm_core.testing.{name}": f"rllm_devkit.checks.{name}" for name in CHECKS},
    "rllm_core.testing.plugin": "rllm_devkit.scripted_plugin",
    "rllm_core.testing.probe": "rllm_devkit.checks.engine_probe",
    **{f"rllm_core.{old}": "rllm_workflows" for old in ("supervised", "builtin.sft")},
    **{f"rllm_core.{old}.rows": "rllm_workflows.sft_rows" for old in ("supervised", "builtin.sft")},
    **{f"rllm_core.{old}.workflow": "rllm_workflows.sft" for old in ("supervised", "builtin.sft")},
}
"""New names of modules by their old ones."""

SPLIT: dict[str, str | tuple[str, ...]] = {
    "rllm_core.algorithms.corrections": "rllm_core.builtin.off_policy_corrections",
    "rllm_core.algorithms.torch_losses": "rllm_core.builtin.losses",
    "rllm_core.config": "rllm_core.assembly.resolution",
    "rllm_core.runs.launch": "rllm_core.assembly.parts",
    "rllm_core.providers": "rllm_core.providers",
    "rllm_core.sandbox": "rllm_core.builtin.sandbox",
    "rllm_core.testing": ("rllm_devkit.checks", "rllm_devkit.scripted"),
}
"""New modules of names that moved, by old module and name. The ``__getattr__`` of the old modules is `moved_names`."""

RENAMED = {
    "rllm_core.algorithms.torch_losses.Reinforce": "ReinforceLoss",
    "rllm_core.runs.launch.Assembly": "Parts",
    **{f"rllm_core.providers.{name}": f"{name}Provider" for name in RECORDS},
}
"""New names of classes by their old ones."""


class MovedModules:
    """Finds modules by their old names. Returns the new module itself, so that its classes exist only once."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Finds a module of `MOVED`."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to create the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the module with the one at its new name."""
        old = module.__name__
        package = MOVED[old].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise ImportError(f"{old} has moved to {name}; install it with: pip install {name}")
        warnings.warn(f"{old} is now {MOVED[old]}; it will be removed in rllm-core 0.3", DeprecationWarning, 2)
        sys.modules[old] = importlib.import_module(MOVED[old])


def moved_names(old: str) -> Callable[[str], Any]:
    """Returns a ``__getattr__`` for module ``old``, which finds names that moved and warns once for each."""

    def find(name: str) -> Any:
        new_name, modules = RENAMED.get(f"{old}.{name}", name), SPLIT[old]
        for new in (modules,) if isinstance(modules, str) else modules:
            if name.startswith("_") or (new, new_name) == (old, name):
                continue
            found = getattr(importlib.import_module(new), new_name, None)
            if f"{getattr(found, '__module__', None)}.".startswith(f"{new}."):  # excludes names that the module imports
                message = f"{old}.{name} is now {new}.{new_name}; it will be removed in rllm-core 0.3"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                setattr(sys.modules[old], name, found)
                return found
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedModules())  # first: the new package may have a submodule of the same name
