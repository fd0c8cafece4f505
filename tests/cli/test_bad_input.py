"""Tests user mistakes: one clear line on stderr, a non-zero exit code, no traceback, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import run_in_process

Run = Callable[..., subprocess.CompletedProcess[str]]

RUN_FILE = """
workflow = "sort"
backend = "local"

[training]
steps = 1
"""


@pytest.fixture
def here(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in ``tmp_path``."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RLLM_")}
        environment |= {"RLLM_CONFIG_DIR": str(tmp_path / "config"), **variables}
        return run_in_process(arguments, folder=tmp_path, environment=environment)

    return run


def refused(result: subprocess.CompletedProcess[str], *expected: str, code: int = 2) -> None:
    # A busy machine may need more than 30 s to import torch, which is reported.
    lines = [line for line in result.stderr.strip().splitlines() if "still importing" not in line]
    assert result.returncode == code, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for text in expected:
        assert text in lines[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], ["specify a workflow or a run file"]),
        (["train", "srot"], ["no workflow named 'srot'", "sort"]),
        (["train", "run.yaml"], ["a run file is TOML, and its name ends in .toml"]),
        (["train", "sort", "--backend", "locl"], ["no backend named 'locl'", "local"]),
        (["train", "sort", "--backend", "verl"], ["no backend named 'verl'", "local", "pip install rllm-verl"]),
        (["train", "sort", "--backend", "tinker"], ["no backend named 'tinker'", "pip install rllm-tinker"]),
        (["train", "sort", "--parser", "chat_templat"], ["chat_template"]),
        (["train", "sort", "-o", "training.stepz=3"], ["unknown key 'training.stepz'", "'training.steps'?"]),
        (["train", "sort", "-o", "trainig.steps=3"], ["unknown key 'trainig'", "did you mean 'training'?"]),
        (["train", "sort", "-o", "local.thread=3"], ["unknown key 'local.thread'", "did you mean 'local.threads'?"]),
        (["train", "sort", "-o", "training.steps=many"], ['training.steps = "many"', "must be an integer"]),
        (["train", "sort", "-o", "training.steps=-1"], ["training.steps = -1"]),
        (["train", "sort", "-o", "training.steps"], ["section.key=value"]),
        (["train", "sort", "-o", "training.groups_per_forward_backward=3"], ["does not divide"]),
        (["train", "missing.toml"], ["missing.toml does not exist"]),
        (["train", "sort", "--resume"], ["--resume needs --run-dir"]),
        (["train", "sort", "-o", "algorithm.name=grop"], ["no advantage estimator named 'grop'", "grpo"]),
        (["train", "sort", "-o", "algorithm.correction_options.token_tis.cap=3"], ["has no correction in"]),
        (["train", "sort", "-o", 'training.trackers=["wandbb"]'], ["no tracker named 'wandbb'"]),
        (["eval", "sort", "-k", "4"], ["pass@4 needs"]),
    ],
)  # fmt: skip
def test_one_line_says_what_is_wrong_and_what_is_allowed(
    here: Run, arguments: list[str], expected: list[str], tmp_path: Path
) -> None:
    refused(here(*arguments), *expected)
    assert not (tmp_path / "runs").exists(), "nothing was begun"


@pytest.mark.slow  # these load the backend, which imports torch
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "sort", "-o", "model.path=no/such/folder"], ["model.path = 'no/such/folder'", "no such folder"]),
        (["train", "sort", "-o", "algorithm.loss=magic"], ["algorithm.loss = 'magic'", "reinforce"]),
        (["train", "sort", "-o", "training.rollouts_per_group=1"], ["rollouts_per_group = 1 is too small"]),
        (["train", "sort", "-o", "training.staleness_threshold=1"], ["take turns"]),
        (["eval", "sort", "--checkpoint", "."], ["neither a complete checkpoint nor a run folder"]),
    ],
)  # fmt: skip
def test_what_the_backend_refuses_is_one_line_too(
    here: Run, arguments: list[str], expected: list[str], tmp_path: Path
) -> None:
    refused(here(*arguments), *expected)
    assert not (tmp_path / "runs").exists(), "nothing was begun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["name=grop"], ["algorithm.name = 'grop'", "did you mean 'grpo'?", "installed: ", "rloo"]),
        (["loss=ppo_clipp"], ["algorithm.loss = 'ppo_clipp'", "reinforce", "did you mean 'ppo_clip'?"]),
        (["roles.judge.name=rlo"], ["algorithm.roles.judge.name = 'rlo'", "did you mean 'rloo'?"]),
        (["proximal_policy=forward", "corrections=['tokn_tis']"], ["'tokn_tis'", "did you mean 'token_tis'?"]),
        (["loss=ppo_clip", "loss_options.clip_hi=1"], ["did you mean 'algorithm.loss_options.clip_high'?"]),
        (["loss=ppo_clip", "loss_options.dual_clip=3.0"], ["option of 'dual_clip', but algorithm.loss = 'ppo_clip'"]),
        (["name=dr_grpo", "estimator_options.discount=0.5"], ["option of 'return_to_go'", "name = 'dr_grpo'"]),
    ],
)  # fmt: skip
def test_a_dry_run_finds_slips_in_the_algorithm(
    here: Run, overrides: list[str], expected: list[str], tmp_path: Path
) -> None:
    options = [word for override in overrides for word in ("-o", f"algorithm.{override}")]
    refused(here("train", "sort", "--dry-run", *options), *expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("workflow = sort", ["run.toml is not valid TOML"]),
        ('backend = "local"', ["workflow is not set"]),
        ('workflow = "sort"\ntraining = 3', ["training = 3", "[training]"]),
        ('workflow = "sort"\n[optimizer]\nlearning_rate = "fast"', ['optimizer.learning_rate = "fast"', "number"]),
        ('workflow = "sort"\nrequires = ["rllm-verl>=9"]', ["rllm-verl>=9", "pip install"]),
        ('workflow = "sort"\n[countdwn]\nsteps = 3', ["unknown key 'countdwn'"]),
    ],
)
def test_a_wrong_run_file(here: Run, text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    refused(here("train", "run.toml", "--dry-run"), *expected)


@pytest.mark.slow
def test_a_dataset_row_without_its_fields(here: Run, tmp_path: Path) -> None:
    row = {"question": "?", "target": 3, "nums": [1, 2], "ground_truth": "1 + 2"}
    rows = [row, {key: value for key, value in row.items() if key != "target"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    override = 'countdown.train_file="tasks.jsonl"'
    refused(here("train", "countdown", "-o", override, "--dry-run"), "tasks.jsonl:2", "target")


@pytest.mark.slow
def test_run_folders_that_cannot_be_used(here: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here is a file")
    refused(here("train", "sort", "--run-dir", "file/run"), "file/run cannot be written")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    refused(here("train", "sort", "--run-dir", "other"), "other is not empty and holds no run")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    refused(here("train", "sort", "--run-dir", "new", "--resume"), "new holds no run to resume")
    refused(here("train", "--run-dir", "new", "--resume"), "new holds no run to resume")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_an_override_without_its_option_is_told_its_name(here: Run, command: str) -> None:
    done = here(command, "sort", "training.steps=3", "-o", "training.groups_per_step=2")
    assert done.returncode == 2
    assert "unexpected argument 'training.steps=3'; to override a key, write -o training.steps=3" in done.stderr
    other = here(command, "sort", "guess")
    assert other.returncode == 2
    assert other.stderr.endswith("unexpected argument 'guess'\n")


def test_a_run_folder_is_no_target(here: Run, tmp_path: Path) -> None:
    (tmp_path / "my run").mkdir()
    for name in ("run.toml", "events.jsonl"):
        (tmp_path / "my run" / name).write_text("")
    refused(here("train", "my run"), "my run is a run folder", "--resume --run-dir 'my run'", "train 'my run'/run.toml")
    refused(here("eval", "my run"), "my run is a run folder", "rllm-core eval --checkpoint 'my run'")


def test_a_disabled_plugin_says_who_disabled_it(here: Run) -> None:
    refused(here("train", "sort", RLLM_PLUGINS="local"), "'workflows'", "is disabled", "RLLM_PLUGINS")


def test_tracebacks_only_when_asked_for(here: Run) -> None:
    quiet, loud = here("train", "srot"), here("-v", "train", "srot")
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr
    assert quiet.returncode == loud.returncode == 2


@pytest.mark.slow
def test_dry_run_prints_the_resolved_file_and_allocates_nothing(here: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    result = here("train", "run.toml", "--dry-run", "-o", "training.groups_per_step=4")
    assert result.returncode == 0, result.stderr
    assert 'workflow = "sort"' in result.stdout
    assert "groups_per_step = 4" in result.stdout
    assert "# rollouts_per_step = 64" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml"]
    as_json = here("train", "run.toml", "--dry-run", "--json")
    assert json.loads(as_json.stdout)["derived"]["optimizer_steps"] == 1
    hub = here("train", "run.toml", "--dry-run", "-o", "model.path=owner/model")
    assert "# not checked: model.path = 'owner/model'" in hub.stdout
