"""Tests that figures are functions of the raw trials. Nothing is timed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import imports, learning, local, trials
from rllm_core.types import Episode, Step, Trajectory

ROOT = Path(__file__).resolve().parents[2]


def step(workload: str, side: str, number: int, wall: float, *, seed: int = 0) -> dict[str, Any]:
    """Row as reported by a side; CPU seconds are half the wall-clock seconds."""
    about = {"kind": "step", "workload": workload, "seed": seed, "side": side, "step": number}
    return {**about, "wall_seconds": wall, "cpu_seconds": wall / 2, "sampled_tokens": 10, "reward_mean": 0.5}


def trained(side: str, seed: int, reward: float) -> dict[str, Any]:
    about = {"kind": "trained", "workload": "sort", "seed": seed, "side": side, "steps": 3}
    return {**about, "reward_mean": reward, "solved": reward}


def sampled(model: str, batch: int, side: str, trial: int, wall: float, tokens: int = 100) -> dict[str, Any]:
    about = {"kind": "sampling", "model": model, "parameters": 1, "batch": batch, "side": side, "trial": trial}
    return {**about, "tokens": tokens, "wall_seconds": wall, "cpu_seconds": 2 * wall}


def test_a_paired_ratio_is_not_a_ratio_of_medians() -> None:
    # Three adjacent pairs, each 2 to 1; the machine was slow during the last two.
    assert trials.paired_ratio([(1.0, 2.0), (10.0, 20.0), (11.0, 22.0)]) == 2.0
    # One disturbed pair does not change the figure.
    assert trials.paired_ratio([(1.0, 2.0), (1.0, 2.0), (1.0, 90.0)]) == 2.0


def test_steps_are_compared_with_their_neighbours_and_without_the_warm_up() -> None:
    rows = []
    for number, (core, trl) in enumerate([(9.0, 1.0), (9.0, 1.0), (0.1, 0.5), (0.2, 1.0), (0.4, 1.6)], start=1):
        rows += [step("sort", "core", number, core), step("sort", "trl", number, trl)]
    found = local.figures(rows)
    assert found["steps_per_second_over_trl"] == 5.0
    assert found["steps_per_second_over_trl_cpu"] == 5.0
    assert found["sort_step_ms"] == {"core": 200.0, "trl": 1000.0}
    assert "steps_per_second_over_trl_long" not in found
    assert "tokens_per_second_over_hf_generate" not in found


def test_steps_of_different_seeds_are_not_mixed_up() -> None:
    rows = [
        step("endless", side, 3, wall, seed=seed) for seed in (0, 1) for side, wall in (("core", 1.0), ("trl", 3.0))
    ]
    rows[-1]["wall_seconds"] = 5.0
    assert local.figures(rows)["steps_per_second_over_trl_long"] == 4.0


def test_long_completions_are_compared_with_and_without_the_extra() -> None:
    sides = {"core": 1.0, "core_without_extra": 2.0, "trl": 3.0}
    rows = [step("endless", side, number, wall) for number in (3, 4) for side, wall in sides.items()]
    found = local.figures(rows)
    assert found["steps_per_second_over_trl_long"] == 3.0
    assert found["steps_per_second_over_trl_long_without_extra"] == 1.5
    assert found["endless_step_ms"] == {"core": 1000.0, "core_without_extra": 2000.0, "trl": 3000.0}


def test_a_step_that_only_one_side_finished_counts_for_nothing() -> None:
    rows = [step("sort", "core", 3, 1.0), step("sort", "trl", 3, 2.0), step("sort", "core", 4, 100.0)]
    assert local.figures(rows)["steps_per_second_over_trl"] == 2.0


def test_peaks_are_the_largest_of_each_side() -> None:
    rows = []
    for number, (core, trl, bare) in enumerate([(800, 1000, 500), (900, 1800, 1200), (850, 1500, 1000)], start=1):
        for side, peak in (("core", core), ("trl", trl), ("bare", bare)):
            rows.append({**step("real_vocabulary", side, number, 1.0), "peak_mb": peak})
    found = local.figures(rows)
    assert found["real_vocabulary_peak_mb"] == {"bare": 1200, "core": 900, "trl": 1800}
    assert found["real_vocabulary_peak_over_trl"] == 0.5
    assert found["real_vocabulary_peak_over_bare_transformers"] == 0.75
    assert found["real_vocabulary_steps_per_second_over_trl"] == 1.0


def test_the_sampling_figure_is_the_smallest_of_all_models_and_batches() -> None:
    rows = []
    for model, batch, theirs in (("starter", 8, 3.0), ("starter", 128, 1.5), ("half_million", 8, 2.0)):
        for trial in range(3):
            rows += [sampled(model, batch, "core", trial, 1.0), sampled(model, batch, "transformers", trial, theirs)]
    found = local.figures(rows)
    assert found["tokens_per_second_over_hf_generate"] == 1.5
    assert found["tokens_per_second_over_hf_generate_by_model_and_batch"] == {
        "starter/8": 3.0,
        "starter/128": 1.5,
        "half_million/8": 2.0,
    }


def test_sampling_is_compared_per_token() -> None:
    rows = [sampled("starter", 8, "core", 0, 1.0, tokens=200), sampled("starter", 8, "transformers", 0, 1.0)]
    assert local.figures(rows)["tokens_per_second_over_hf_generate"] == 2.0


def test_rewards_after_equal_steps_are_means_over_the_runs() -> None:
    rows = [trained("core", 0, 0.5), trained("core", 1, 0.7), trained("trl", 0, 0.4), trained("trl", 1, 0.5)]
    assert local.figures(rows) == {"reward_after_equal_steps": {"ours": 0.6, "trl": 0.45}}


def test_import_figures() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "import", "what": what, "side": side, "trial": 0, "wall_seconds": wall, "cpu_seconds": wall}
        for what, side, wall in (
            ("package", "core", 1.1),
            ("package", "dependencies", 1.0),
            ("contracts", "core", 3.0),
            ("contracts", "dependencies", 2.0),
        )
    ]
    rows += [
        {"kind": "plugins_command", "trial": trial, "wall_seconds": wall, "cpu_seconds": 0.1}
        for trial, wall in enumerate((0.2, 0.9, 0.3))
    ]
    found = imports.figures(rows)
    assert found["import_over_dependencies"] == 1.1
    assert found["contracts_over_dependencies"] == 1.5
    assert found["plugins_command_ms"] == 200.0
    assert found["plugins_command_median_ms"] == 300.0


def test_third_party_modules_are_those_of_dependencies_only() -> None:
    modules = ["json", "pluggy", "pluggy._hooks", "rllm_core.types", "_virtualenv", "__editable___x", "numpy"]
    assert imports.third_party(modules) == ["pluggy", "pluggy._hooks", "numpy"]


def test_learning_figures_are_those_of_the_worst_seed() -> None:
    rows: list[dict[str, Any]] = [
        {
            "kind": "training",
            "workflow": workflow,
            "parser": parser,
            "seed": seed,
            "solved_before": before,
            "solved_after": after,
            "cpu_seconds": cpu,
            "segment_breaks": breaks,
            "tool_call_share": share,
        }
        for workflow, parser, seed, before, after, cpu, breaks, share in (
            ("sort", "chat_template", 0, 0.01, 0.99, 30.0, 0, None),
            ("sort", "chat_template", 1, 0.04, 0.96, 40.0, 0, None),
            ("guess", "chat_template", 0, 0.30, 0.95, 20.0, 0, None),
            ("calculator", "chat_template", 0, 0.01, 0.97, 30.0, 0, 0.99),
            ("calculator", "renderer", 0, 0.02, 0.99, 30.0, 0, 1.0),
            ("calculator", "renderer", 1, 0.01, 0.98, 31.0, 2, 0.98),
        )
    ]
    assert learning.figures(rows) == {
        "solved_before_max": 0.04,
        "solved_after_min": 0.96,
        "cpu_seconds_max": 40.0,
        "seeds": 2,
        "guess_solved_before_max": 0.3,
        "guess_solved_after_min": 0.95,
        "guess_cpu_seconds_max": 20.0,
        "guess_seeds": 1,
        "calculator_chat_template_solved_before_max": 0.01,
        "calculator_chat_template_solved_after_min": 0.97,
        "calculator_chat_template_cpu_seconds_max": 30.0,
        "calculator_chat_template_seeds": 1,
        "calculator_chat_template_tool_call_share_min": 0.99,
        "calculator_chat_template_segment_breaks": 0,
        "calculator_renderer_solved_before_max": 0.02,
        "calculator_renderer_solved_after_min": 0.98,
        "calculator_renderer_cpu_seconds_max": 31.0,
        "calculator_renderer_seeds": 2,
        "calculator_renderer_tool_call_share_min": 0.98,
        "calculator_renderer_segment_breaks": 2,
    }


def conversation(*messages: dict[str, Any], answer: str, step: int) -> dict[str, Any]:
    """Line of ``trajectories.jsonl``: the last messages the model saw, and its answer."""
    last = Step(
        messages=messages, response={"role": "assistant", "content": answer}, prompt_ids=[1], completion_ids=[2]
    )
    episode = Episode(task_id="t", trajectories=[Trajectory(steps=[last], reward=1.0)])
    return {"step": step, "episode": json.loads(episode.to_json())}


def test_tool_calls_count_where_a_tool_answered_with_a_number_near_the_end() -> None:
    asked = {"role": "user", "content": "3 plus 4"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "add"}}]}
    result, complaint = ({"role": "tool", "tool_call_id": "c", "content": text} for text in ("52", "error: no"))
    stray = {"role": "tool", "tool_call_id": "d", "content": "52"}
    executed = conversation(asked, called, result, answer="52", step=100)
    kept = [
        *(conversation(asked, answer="42", step=step) for step in (0, 50, 90)),
        executed,
        {**executed, "step": 95},
        conversation(asked, called, complaint, called, result, answer="52", step=100),
        conversation(asked, called, complaint, answer="52", step=100),
        conversation(asked, called, stray, answer="52", step=100),
    ]
    assert learning.tool_call_share(kept) == 3 / 5


def test_outcome_reads_first_and_last_validation() -> None:
    validation = [
        {"step": number, "rollouts": rollouts, "reward_mean": solved / 2, "solved": solved}
        for number, rollouts, solved in ((0, 512, 0.1), (5, 512, 0.5), (9, 510, 0.9))
    ]
    found = learning.outcome({"status": "completed", "optimizer_steps": 9, "validation": validation})
    assert (found["solved_before"], found["solved_after"], found["validation_rollouts"]) == (0.1, 0.9, 510)


def test_measured_counts_the_cpu_time_of_grandchildren() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}], check=True)"
    assert learning.measured([sys.executable, "-c", parent], {})["cpu_seconds"] >= 0.3


def test_measured_fails_with_its_command() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        learning.measured([sys.executable, "-c", "raise SystemExit(3)"], {})


def test_figures_can_be_recomputed_from_the_file(tmp_path: Path) -> None:
    rows = [step("sort", side, number, wall) for number in (3, 4) for side, wall in (("core", 1.0), ("trl", 4.0))]
    file = tmp_path / "raw.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "conditions"}, *rows]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.local", "--from-raw", str(file)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == local.figures(rows)


def test_trials_are_on_disk_before_the_benchmark_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    with trials.RawTrials("something", {"trials": 3}) as raw:
        raw.add({"kind": "import", "wall_seconds": 1.0})
        on_disk = trials.read_rows(trials.raw_path("something"))
    assert on_disk == raw.rows
    assert on_disk[0]["kind"] == "conditions"
    assert on_disk[0]["settings"] == {"trials": 3}
    assert on_disk[1] == {"kind": "import", "wall_seconds": 1.0}
