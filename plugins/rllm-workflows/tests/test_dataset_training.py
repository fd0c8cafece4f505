"""A model learns rows of a file, with rewards from a child process."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
import rllm_workflows
from rllm_workflows.sort import is_held_out, prompt

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assembled(path, *overrides):
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(rllm_workflows, "workflows")
    small = ("training.steps=3", "training.groups_per_step=4", "training.rollouts_per_group=4")
    chosen = (f"dataset.train_file={path}", "dataset.held_out_share=0.3", *small, *overrides)
    return assemble(load_run_config("dataset", plugins, overrides=chosen, backend="scripted"), plugins)


@pytest.mark.slow
def test_three_steps_are_trained_on_the_rewards_of_a_file(tmp_path):
    path = write(tmp_path / "rows.jsonl", ({"question": f"Is {n} {n}?", "answer": "yes"} for n in range(30)))
    assembly = assembled(path, "training.validation_rollouts=64")
    summary = asyncio.run(launch.train(assembly, tmp_path / "run", resume=False, progress=Progress()))
    assert summary["status"] == "completed"
    assert summary["books"]["trained"] == 3 * 4 * 4
    assert verify(tmp_path / "run").problems == []
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["reward_mean"] < 1 and row["reward_mean"] == row["solved"] for row in metrics)
    first, last = summary["validation"][0], summary["validation"][-1]
    assert last["solved"] > first["solved"], "the scripted policy moves by what its rewards say, and by nothing else"


def test_what_is_wrong_with_a_row_is_known_before_anything_is_allocated(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "a?", "answer": "b"}, {"question": "c?", "anwser": "d"}])
    with pytest.raises(ConfigError, match=r"rows.jsonl line 2: 'answer' is missing"):
        assembled(path)


@pytest.mark.slow
def test_the_starter_model_learns_to_sort_from_rows(rllm_core, tmp_path):
    """At most 10 % of held-out rows are solved initially, by chance, and at least half after 40 steps."""
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=4)]
    rows = {False: [], True: []}
    for word in words:
        rows[is_held_out(word)].append({"question": prompt(word), "answer": "".join(sorted(word))})
    run_dir = tmp_path / "run"
    overrides = {
        "dataset.train_file": write(tmp_path / "train.jsonl", rows[False]),
        "dataset.validation_file": write(tmp_path / "validation.jsonl", rows[True]),
        "training.steps": 40,
        "training.rollouts_per_group": 16,
        "rollout.max_response_tokens": 6,
        "algorithm.entropy_coefficient": 0.002,
        "optimizer.learning_rate": 1e-3,
    }
    options = [argument for key, value in overrides.items() for argument in ("-o", f"{key}={value}")]
    rllm_core("train", "dataset", "--backend", "local", "--run-dir", run_dir, *options)
    summary = json.loads((run_dir / "summary.json").read_text())
    first, last = summary["validation"][0], summary["validation"][-1]
    assert first["solved"] <= 0.1
    assert last["solved"] >= 0.5
    assert summary["books"]["failed"] == 0
