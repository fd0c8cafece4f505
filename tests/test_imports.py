"""Tests which modules are imported by the core and by listing plugins, in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rllm_core

# Modules that `import rllm_core` may import in addition to the standard library.
ALLOWED_BY_THE_PACKAGE = {"pluggy", "rllm_core"}
ALLOWED_BY_THE_LISTING = {"click", "importlib_metadata", "lazy_importer", "pluggy", "rllm_core", "zipp"}
ALLOWED_BY_THE_HELP = ALLOWED_BY_THE_LISTING | {"rllm_devkit"}  # provides a command of the group
NEVER = {"torch", "transformers", "verl", "vllm", "tinker", "ray", "peft", "renderers", "jax"}

REPORT = """
import json, sys
before = set(sys.modules)
{code}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps(sorted(name for name in new if name not in sys.stdlib_module_names)), file=sys.stderr)
"""


def imported_by(code: str, tmp_path: Path) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-P", "-c", REPORT.format(code=code)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=120,
    )
    # Editable installs add their own finder module to sys.modules.
    return {name for name in json.loads(run.stderr.splitlines()[-1]) if not name.startswith(("__editable__", "_"))}


def command(*args: str) -> str:
    return f"""from rllm_core.cli import main
try:
    main({list(args)})
except SystemExit as end:
    assert not end.code
"""


def test_import_of_the_package_is_light(tmp_path: Path) -> None:
    assert imported_by("import rllm_core", tmp_path) <= ALLOWED_BY_THE_PACKAGE


@pytest.mark.slow
def test_what_programs_use_is_imported_when_they_use_it(tmp_path: Path) -> None:
    used = imported_by("import rllm_core; rllm_core.train; rllm_core.evaluate; rllm_core.Run", tmp_path)
    assert "numpy" in used
    assert not used & (NEVER | {"matplotlib", "pandas", "rich"})


def test_what_programs_use_is_listed() -> None:
    assert {"Run", "evaluate", "train"} <= set(dir(rllm_core))
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        rllm_core.tarin  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("args", [("plugins",), ("plugins", "--json"), ("--version",), ("plugins", "show", "--help")])
def test_listing_plugins_is_light(tmp_path: Path, args: tuple[str, ...]) -> None:
    assert imported_by(command(*args), tmp_path) <= ALLOWED_BY_THE_LISTING


def test_help_of_a_group_is_light(tmp_path: Path) -> None:
    assert imported_by(command("plugins", "--help"), tmp_path) <= ALLOWED_BY_THE_HELP


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [("--help",), ("backends",), ("engines",), ("parsers",), ("workflows",), ("train", "--help"), ("eval", "--help")],
)
def test_finding_providers_never_imports_a_heavy_library(tmp_path: Path, args: tuple[str, ...]) -> None:
    assert not imported_by(command(*args), tmp_path) & NEVER


@pytest.mark.parametrize(
    "module",
    ["types", "engine", "parser", "backend", "workflow", "config", "plugins", "observers", "providers", "hookspecs"],
)
def test_contracts_never_import_a_heavy_library(tmp_path: Path, module: str) -> None:
    assert not imported_by(f"import rllm_core.{module}", tmp_path) & NEVER


def test_the_report_sees_what_is_imported(tmp_path: Path) -> None:
    """The checks above would always pass if the report missed imports."""
    assert "numpy" in imported_by("import rllm_core.types", tmp_path)
    assert "rich" in imported_by("import rllm_core, rich", tmp_path)


def test_the_core_names_the_devkit_only_to_forward_and_to_install_it() -> None:
    """Training needs none of it, so the core must run without it."""
    core = Path(rllm_core.__file__).parent
    naming = {path.name for path in core.rglob("*.py") if "rllm_devkit" in path.read_text(encoding="utf-8")}
    assert naming == {"moved.py", "testing.py"}


def test_the_core_names_the_viewer_only_to_forward_and_to_install_it() -> None:
    core = Path(rllm_core.__file__).parent
    naming = {path.name for path in core.rglob("*.py") if "rllm_viewer" in path.read_text(encoding="utf-8")}
    assert naming == {"moved.py", "run.py"}
