"""Tests that only the plugin manager names what the core ships, that algorithms are pure, and names that moved."""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from pathlib import Path

import pytest

import rllm_core
from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.config import AlgorithmConfig
from rllm_core.moved import MOVED

CORE = Path(rllm_core.__file__).parent
MAY_NAME_BUILTIN = {"moved.py", "plugins/manager.py"}  # old names, and the plugin manager's entry
MAY_BE_IMPORTED_BY_ALGORITHMS = {
    "algorithms",
    "backend",
    "errors",
    "moved",
    "run_file",
    "score",
    "seeds",
    "text",
    "tokens",
    "types",
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "rllm_core":
            found |= {f"rllm_core.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return found


def test_nothing_names_what_is_shipped_but_the_entry_of_the_plugin_manager() -> None:
    naming = {
        str(path.relative_to(CORE))
        for path in CORE.rglob("*.py")
        if "rllm_core.builtin" in path.read_text(encoding="utf-8") and path.relative_to(CORE).parts[0] != "builtin"
    }
    assert naming == MAY_NAME_BUILTIN


@pytest.mark.parametrize("path", sorted((CORE / "algorithms").glob("*.py")), ids=lambda path: path.name)
def test_algorithms_import_only_numpy_and_contracts(path: Path) -> None:
    wanted = {name for name in imports(path) if name.partition(".")[0] not in sys.stdlib_module_names}
    rooms = {name.split(".")[1] for name in wanted if name.startswith("rllm_core.")}
    libraries = {name.partition(".")[0] for name in wanted} - {"rllm_core"}
    assert rooms <= MAY_BE_IMPORTED_BY_ALGORITHMS
    assert libraries <= {"numpy"} | ({"torch"} if path.name == "torch_losses.py" else set())


def test_aggregations_are_those_of_the_run_file() -> None:
    from typing import get_args

    assert set(get_args(AlgorithmConfig.model_fields["aggregation"].annotation)) == AGGREGATIONS


# --------------------------------------------------------------------------------------------------------------------
# Old names


@pytest.mark.parametrize("old", MOVED)
def test_modules_that_moved_are_the_same_modules(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(MOVED[old])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(old.rpartition(".")[0])  # its package may have moved, too
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        assert importlib.import_module(old) is new


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("rllm_core.algorithms.corrections", "TokenTIS", "rllm_core.builtin.off_policy_corrections.TokenTIS"),
        ("rllm_core.algorithms.torch_losses", "PPOClip", "rllm_core.builtin.losses.PPOClip"),
        ("rllm_core.algorithms.torch_losses", "Reinforce", "rllm_core.builtin.losses.ReinforceLoss"),
        ("rllm_core.config", "load_run_config", "rllm_core.assembly.resolution.load_run_config"),
        ("rllm_core.runs.launch", "Assembly", "rllm_core.assembly.parts.Parts"),
        ("rllm_core.runs.launch", "assemble", "rllm_core.assembly.parts.assemble"),
        ("rllm_core.sandbox", "ChildSandbox", "rllm_core.builtin.sandbox.ChildSandbox"),
    ],
)
def test_names_that_moved_are_the_same_objects(old: str, name: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(old)
    monkeypatch.delitem(vars(module), name, raising=False)  # another test may have used it
    with pytest.warns(DeprecationWarning, match=f"{old}.{name} is now {new}") as warned:
        found = getattr(module, name)
    assert len(warned) == 1
    assert f"{found.__module__}.{found.__qualname__}" == new
    assert getattr(module, name) is found, "warns once"
    monkeypatch.delattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'TokenTees'"):
        _ = module.TokenTees
