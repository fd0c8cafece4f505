"""Tests that a dry run shows what is set, and where each value comes from."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rllm_core.cli import Session, cli

RUN_FILE = """
workflow = "sort"
[training]
steps = 7
groups_per_step = 4
[sort]
length = 3
"""


@pytest.fixture
def dry_run(tmp_path: Path) -> Any:
    (tmp_path / "run.toml").write_text(RUN_FILE)

    def run(*options: str, verbose: bool = False) -> str:
        before = ["-v"] if verbose else []
        arguments = [*before, "train", str(tmp_path / "run.toml"), "--backend", "local", "--dry-run", *options]
        done = CliRunner().invoke(cli, arguments, obj=Session(), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def test_every_value_has_its_source(dry_run: Any) -> None:
    shown = json.loads(dry_run("--json", "-o", "training.steps=100", "-o", "local.lora.rank=4"))
    sources = shown["sources"]
    assert sources["training.steps"] == "option"
    assert sources["local.lora.rank"] == sources["backend"] == "option"
    assert sources["training.groups_per_step"] == sources["sort.length"] == sources["workflow"] == "file"
    assert sources["rollout.max_response_tokens"] == "workflow"
    assert sources["parser"] == "backend"
    assert sources["training.seed"] == sources["local.lora.alpha"] == sources["sort.letters"] == "default"
    assert shown["resolved"]["training"]["steps"] == 100


def test_only_what_is_set_is_shown_even_if_it_is_the_default(dry_run: Any) -> None:
    lines = dry_run("-o", "training.steps=100").splitlines()
    [steps] = [line for line in lines if line.startswith("steps =")]
    assert steps.split() == ["steps", "=", "100", "#", "option"]
    assert not [line for line in lines if line.startswith("seed =") or line.endswith("# default")]


def test_verbose_shows_the_whole_run_file(dry_run: Any) -> None:
    text, as_json = dry_run(verbose=True), json.loads(dry_run("--json"))
    assert tomllib.loads(text) == as_json["resolved"]
    [seed] = [line for line in text.splitlines() if line.startswith("seed =")]
    assert seed.endswith("# default")
    assert tomllib.loads(dry_run()).keys() < as_json["resolved"].keys()


def test_replaced_options_of_the_workflow_have_no_source(dry_run: Any) -> None:
    shown = json.loads(dry_run("--json", "-o", "algorithm.name=rloo", "-o", "algorithm.corrections=[]"))
    assert shown["sources"]["algorithm.name"] == "option"
    assert set(shown["sources"].values()) <= {"workflow", "file", "option", "backend", "default"}


def test_the_prediction_names_its_assumptions_and_a_budget_that_is_too_small(dry_run: Any) -> None:
    settings = ("-o", "costs.budget.calls=100", "-o", "costs.prices.sampling={million_completion_tokens=2.5}")
    shown = json.loads(dry_run("--json", *settings))
    prediction, training = shown["prediction"], shown["resolved"]["training"]
    rollouts = 7 * 4 * training["rollouts_per_group"] + 2 * training["validation_rollouts"]
    tokens = rollouts * shown["resolved"]["rollout"]["max_response_tokens"]
    assert (prediction["calls"], prediction["tokens"]) == (rollouts, tokens)
    assert prediction["money"] == pytest.approx(tokens * 2.5e-6)
    assert "assumed, not measured" in prediction["how"]
    assert any("costs.budget.calls = 100 is less than the prediction" in note for note in shown["notes"])
    assert f"# sampling: {rollouts:,} calls" in dry_run(*settings)


def test_a_price_of_a_kind_that_the_core_does_not_know_is_noted(dry_run: Any) -> None:
    prices = ("-o", "costs.prices.sampling.hour=1", "-o", "costs.prices.samplings.hour=1")
    notes = [note for note in json.loads(dry_run("--json", *prices))["notes"] if "costs.prices" in note]
    assert len(notes) == 1
    assert notes[0].startswith("costs.prices.samplings ")


def test_a_section_that_the_run_does_not_use_is_noted(dry_run: Any) -> None:
    options = ("-o", "dataset.solved_at=0.5", "-o", "sort.length=4", "-o", "local.threads=1")
    notes = [note for note in json.loads(dry_run("--json", *options))["notes"] if "has no effect" in note]
    assert [note.split()[0] for note in notes] == ["[dataset]"]
