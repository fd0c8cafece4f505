"""Tests packages as users get them: built, installed with pip into a separate environment, and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clean_environment import CleanEnvironment

INSIDE = """
import json, sys
from rllm_core.cli import main
try:
    main(sys.argv[2:])
finally:
    with open(sys.argv[1], "w", encoding="utf-8") as report:
        json.dump({name: module.__file__ for name, module in sys.modules.items() if name.startswith("rllm")}, report)
"""
STEPS = 3


@pytest.fixture(scope="module")
def trained(clean: CleanEnvironment) -> Path:
    """Run folder of a short run of the third-party workflow, next to a list of the modules' origins."""
    run_dir = clean.home / "run"
    small = (f"training.steps={STEPS}", "training.groups_per_step=4", "training.rollouts_per_group=4",
             "training.validation_rollouts=16", "relay.letters=abcdef")  # fmt: skip
    options = [argument for override in small for argument in ("-o", override)]
    arguments = ["train", "relay", "--backend", "local", "--run-dir", str(run_dir), *options]
    clean.run("python", "-c", INSIDE, str(clean.home / "modules.json"), *arguments, OMP_NUM_THREADS="1")
    return run_dir


def rows(clean: CleanEnvironment, *arguments: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(clean.run("rllm-core", *arguments, "--json").stdout)}


@pytest.mark.slow
def test_the_environment_has_what_was_installed_and_is_healthy(clean: CleanEnvironment) -> None:
    found = rows(clean, "plugins")
    assert {name: (row["package"], row["status"]) for name, row in found.items()} == {
        "devkit": ("rllm-devkit", "available"),
        "local": ("rllm-local", "available"),
        "relay": ("rllm-relay", "available"),
        "renderers": ("rllm-renderers", "available"),
        "tidy": ("rllm-tidy", "available"),
        "viewer": ("rllm-viewer", "available"),
        "workflows": ("rllm-workflows", "available"),
    }
    report = json.loads(clean.run("rllm-core", "doctor", "--json").stdout)
    assert report["problems"] == []
    assert report["packages"]["torch"]


@pytest.mark.slow
def test_every_plugin_loads_and_is_light(clean: CleanEnvironment) -> None:
    found = rows(clean, "plugins", "--load")
    assert {name: (row["status"], row["warnings"]) for name, row in found.items()} == {
        name: ("loaded", []) for name in ("devkit", "local", "relay", "renderers", "tidy", "viewer", "workflows")
    }


@pytest.mark.slow
def test_the_core_alone_names_the_package_of_a_command(bare: CleanEnvironment) -> None:
    for command in (("new", "workflow", "mine"), ("plugins", "check", "relay"), ("parser", "check", "some/model")):
        said = bare.run("rllm-core", *command, code=2).stderr
        assert said.endswith("needs rllm-devkit, which is not installed; install it with: pip install rllm-devkit\n")
    assert "pip install rllm-devkit" in bare.run("rllm-core", "--help").stdout
    said = bare.run("python", "-c", "import rllm_core.testing.scripted", code=1).stderr
    assert said.splitlines()[-1].startswith("ImportError: rllm_core.testing has moved to rllm-devkit")
    said = bare.run("rllm-core", "verify", "run", code=2).stderr
    assert said.endswith("needs rllm-viewer, which is not installed; install it with: pip install rllm-viewer\n")
    said = bare.run("python", "-c", "import rllm_core.training.verify", code=1).stderr
    assert said.splitlines()[-1].endswith("has moved to rllm-viewer; install it with: pip install rllm-viewer")


@pytest.mark.slow
def test_a_strangers_plugin_is_shown_with_its_requirements(clean: CleanEnvironment) -> None:
    row = rows(clean, "plugins", "show", "relay")["relay"]
    assert (row["version"], row["status"], row["missing"]) == ("2.1", "loaded", [])
    assert row["requires"] == ["pydantic>=2.7", "rllm-core>=0.1"]
    assert [(item["kind"], item["name"]) for item in row["provides"]] == [
        ("workflow", "relay"),
        ("reward function", "letters_in_place"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relay", "tidy"])
def test_a_strangers_plugin_passes_every_check(clean: CleanEnvironment, name: str) -> None:
    """The checks are part of the devkit's wheel and need only its declared requirements."""
    clean.run("rllm-core", "plugins", "check", name)


@pytest.mark.slow
def test_what_new_makes_trains_from_its_wheel(clean: CleanEnvironment, tmp_path: Path) -> None:
    arguments = ("train", "tidy", "--backend", "local", "--run-dir", tmp_path / "run", "-o", "training.steps=2")
    clean.run("rllm-core", *arguments, OMP_NUM_THREADS="1")
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["optimizer_steps"] == 2


@pytest.mark.slow
def test_it_trains_with_modules_of_that_environment_only(clean: CleanEnvironment, trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["optimizer_steps"]) == ("completed", STEPS)
    modules: dict[str, str] = json.loads((clean.home / "modules.json").read_text(encoding="utf-8"))
    assert {"rllm_core.training.trainer", "rllm_local.backend", "rllm_relay.workflow"} <= modules.keys()
    assert [name for name, file in modules.items() if not Path(file).is_relative_to(clean.site_packages)] == []
    settings = (trained / "run.toml").read_text(encoding="utf-8")
    assert 'letters = "abcdef"' in settings, "its own section"
    assert 'name = "return_to_go"' in settings, "its own preset"


@pytest.mark.slow
def test_the_run_can_be_verified_and_measured(clean: CleanEnvironment, trained: Path) -> None:
    verified = clean.run("rllm-core", "verify", trained).stdout
    measure = ("rllm-core", "eval", "relay", "--checkpoint", trained, "--tasks", "4", "-n", "2", "--json")
    measured = json.loads(clean.run(*measure, OMP_NUM_THREADS="1").stdout)
    assert verified
    assert 0.0 <= measured["pass_at_k"][0]["value"] <= 1.0


@pytest.mark.slow
@pytest.mark.by_hand  # wheels have the modules of this checkout, which other tests let learn
def test_it_learns(clean: CleanEnvironment, tmp_path: Path) -> None:
    arguments = ("train", "relay", "--backend", "local", "--run-dir", tmp_path / "run", "-o", "training.steps=40")
    clean.run("rllm-core", *arguments, OMP_NUM_THREADS="1")
    first, last = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["validation"]
    assert first["solved"] < 0.05
    assert last["solved"] > 0.2
