"""Tests the rules of the diagnosis on metrics written by hand, and what is shown of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recorded_runs
from recorded_runs import add_tokens, called, group, rollout, sorting, write_run

from rllm_core.config import RunConfig
from rllm_core.events import TrainerState
from rllm_core.types import FinishReason
from rllm_viewer import answers_table, closing, warnings_of_runs
from rllm_viewer.commands.diagnose import diagnose
from rllm_viewer.diagnosis import Diagnosis, of_folder
from rllm_viewer.diagnosis.findings import Finding

HEALTHY = {
    "reward_mean": 0.4, "trajectory_reward_max": 1.0, "solved": 0.3, "uniform_groups_share": 0.25,
    "truncated_share": 0.1, "distinct_samples_share": 0.8, "samples": 32.0, "groups": 4.0, "trajectories": 32.0,
    "grad_norm": 1.5, "groups_solved_by_none": 0.5, "staleness_mean": 0.0, "staleness_max": 0.0,
    "off_policy_log_ratio": 0.001, "off_policy_effective_share": 0.99,
}  # fmt: skip
NEVER = {"solved": 0.0, "uniform_groups_share": 1.0, "reward_mean": 0.0, "groups_solved_by_none": 1.0, "grad_norm": 0.0}
TABLES = {"training": {"steps": 100}, "optimizer": {"warmup_steps": 5, "max_grad_norm": 1.0}}


def names(*rows: dict[str, Any], tables: dict[str, Any] = TABLES) -> list[str]:
    diagnosis = Diagnosis(tables)
    for step, row in enumerate(rows, 1):
        diagnosis.step({"step": step, **HEALTHY, **row})
    return [finding.name for finding in diagnosis.findings]


AGENT = {"workflow/gateway_calls": 4.0, "workflow/gateway_roots": 1.0, "turns_mean": 4.0, "segment_breaks": 0.0}
TROUBLES = [
    ("nobody-solves-it", 3, NEVER, []),
    ("everybody-solves-it", 3, {"solved": 1.0, "uniform_groups_share": 1.0, "reward_mean": 1.0}, []),
    ("all-groups-equal", 10, {"solved": 0.5, "uniform_groups_share": 1.0}, []),
    ("the-policy-broke", 3, NEVER, [{}]),
    ("answers-cut-off", 3, {"truncated_share": 0.9}, []),
    ("one-answer", 5, {"distinct_samples_share": 0.125, "solved": 0.0}, []),
    ("gradient-always-clipped", 10, {"grad_norm": 50.0}, []),
    ("too-stale", 5, {"staleness_mean": 3.0, "staleness_max": 4.0, "off_policy_effective_share": 0.1}, []),
    ("sampler-and-trainer-apart", 3, {"off_policy_log_ratio": 0.2}, []),
    ("every-call-a-conversation", 3, AGENT | {"workflow/gateway_roots": 3.0}, []),
    ("conversations-break", 3, AGENT | {"segment_breaks": 40.0}, []),
    ("nobody-solves-it", 30, {"groups_solved_by_none": 1.0, "solved": 0.0}, []),
]


@pytest.mark.parametrize(("name", "steps", "row", "before"), TROUBLES)
def test_a_trouble_is_named_when_it_is_certain_and_no_longer_when_it_is_over(
    name: str, steps: int, row: dict[str, Any], before: list[dict[str, Any]]
) -> None:
    assert name not in names(*before, *[row] * (steps - 1))
    assert names(*before, *[row] * steps)[0] == name
    assert name in names(*before, *[row] * steps, *[{}] * (steps - 1))
    assert name not in names(*before, *[row] * steps, *[{}] * steps)


def test_a_healthy_run_has_no_trouble_even_when_it_ends_perfect() -> None:
    perfect = {"solved": 1.0, "uniform_groups_share": 1.0, "reward_mean": 1.0, "distinct_samples_share": 0.125}
    assert names(*[{}] * 40, *[perfect | {"grad_norm": 0.0}] * 40) == []


def test_agents_may_have_a_title_sub_agents_and_some_breaks() -> None:
    title = {"workflow/gateway_calls": 2.0, "workflow/gateway_roots": 2.0}
    sub_agents = {"workflow/gateway_calls": 12.0, "workflow/gateway_roots": 4.0, "segment_breaks": 20.0}
    assert names(*[AGENT | title] * 4) == names(*[AGENT | sub_agents] * 4) == []
    assert names(*[{"segment_breaks": 400.0, "turns_mean": 4.0}] * 4) == [], "workflows without a gateway"


def test_rewards_that_rise_before_anybody_solves_anything_are_no_trouble() -> None:
    unsolved = {"solved": 0.0, "groups_solved_by_none": 1.0, "trajectory_reward_min": 0.0}
    assert names(*[unsolved] * 3, *[unsolved | {"reward_mean": 0.55}] * 60) == []
    assert names(*[unsolved] * 3, *[unsolved | {"reward_mean": 0.45}] * 60) == ["nobody-solves-it"]


def test_a_policy_that_broke_is_named_before_its_other_signs() -> None:
    assert names({}, *[NEVER | {"truncated_share": 1.0}] * 4)[:2] == ["the-policy-broke", "answers-cut-off"]


def test_a_warm_up_longer_than_the_run_is_named_before_the_first_step() -> None:
    assert names(tables={"training": {"steps": 5}, "optimizer": {"warmup_steps": 5}}) == ["warm-up-longer-than-the-run"]
    assert names(tables={"training": {"steps": 6}, "optimizer": {"warmup_steps": 5}}) == []


def test_failing_rollouts_are_named_with_their_reason() -> None:
    diagnosis = Diagnosis(TABLES)
    diagnosis.rollouts({"trained": {"trained": 30}, "failed": {"timeout": 7, "error": 1}})
    assert [(one.name, "'timeout'" in one.seen) for one in diagnosis.findings] == [("rollouts-failing", True)]
    diagnosis.rollouts({"trained": {"trained": 100}, "failed": {"timeout": 8}})
    assert diagnosis.findings == []


ASKED = [{"role": "user", "content": "sort: dbca"}]
TEMPLATE = ("<|im_start|>", "sort: dbca", "<|im_end|>")


def explained(tmp_path: Path, answers: list[tuple[str, ...]], metrics: dict[str, Any], *, cut_off: bool = False) -> str:
    """Returns the first finding of a run with answers, each given by the texts of its tokens."""
    ids = {text: number for number, text in enumerate(sorted({text for one in (*answers, TEMPLATE) for text in one}))}
    of_all: dict[str, Any] = {
        "prompt_ids": [ids[text] for text in TEMPLATE],
        "finish_reason": FinishReason.LENGTH if cut_off else FinishReason.STOP,
        "logprobs": None,
    }
    steps = [
        recorded_runs.step(ASKED, "".join(one[:-1]), completion_ids=[ids[text] for text in one], **of_all)
        for one in answers
    ]
    rollouts = [rollout(index, [one], 0.0) for index, one in enumerate(steps)]
    rows = [{"step": number, **HEALTHY, **metrics} for number in (1, 2, 3)]
    run = write_run(tmp_path / "run", [group(rollouts, step=3)], metrics=rows)
    add_tokens(run, {number: text for text, number in ids.items()})
    return of_folder(run).findings[0].text(run)


END = "<|im_end|>"
OTHERS = "workflow/answers_of_other_rows"
CUT = NEVER | {"truncated_share": 1.0}


@pytest.mark.parametrize(
    ("answers", "metrics", "cut_off", "cause"),
    [
        (
            [("a", "b", END)] * 4,
            NEVER,
            False,
            "too hard for the model; or the reward function never rewards a solution",
        ),
        ([("a", "b", END)] * 4, NEVER | {OTHERS: 0.0}, False, "too hard for the model; or its chat template"),
        ([("a", "b", END)] * 4, NEVER | {OTHERS: 0.1}, False, "belong to other rows; or the model only guesses"),
        (
            [(END,)] * 2 + [("a", END)] * 2,
            NEVER,
            False,
            "2 are empty (since step 1). Cause: the chat template is wrong",
        ),
        ([("a", "<|im_start|>", "b", END)] * 4, NEVER, False, "4 have control tokens such as <|im_start|>"),
        ([("<think>", "a", "</think>", "b", END)] * 4, NEVER, False, "too hard"),
        ([("a", "b")] * 4, CUT, True, "max_response_tokens is too small; or the model never samples"),
        ([("a", END, "a")] * 4, CUT, True, "the stop token is missing: <|im_end|> ends an answer"),
        ([("a", "<|pad|>", END, "a")] * 4, CUT, True, "the chat template is wrong"),  # anything but an answer
        ([("abcd", "\n", "abcd")] * 4, CUT, True, "the stop token is missing: the model never samples it"),
        ([("so ", "so ") * 8] * 4, CUT, True, "the stop token is missing: the model never samples it"),
        ([("abcd", "\n", "abcd")] * 3, CUT, True, "max_response_tokens is too small"),  # too few to tell
    ],
)
def test_answers_tell_causes_apart(
    answers: list[tuple[str, ...]], metrics: dict[str, Any], cut_off: bool, cause: str, tmp_path: Path
) -> None:
    assert cause in explained(tmp_path, answers, metrics, cut_off=cut_off)


def conversations(tmp_path: Path, *prompts: list[dict[str, str]]) -> str:
    """Returns the first finding of a run whose agent begins every call anew."""
    steps = [recorded_runs.step(prompt, "an answer") for prompt in prompts]
    rows = [{"step": one, **HEALTHY, **AGENT, "workflow/gateway_roots": 4.0} for one in (1, 2, 3)]
    run = write_run(tmp_path / "run", [group([rollout(0, steps, 0.0)], step=3)], metrics=rows)
    add_tokens(run, {})
    return of_folder(run).findings[0].text(run)


def test_conversations_tell_habits_of_agents_apart(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "x"}, {"role": "assistant", "content": "in other words"}
    text = conversations(tmp_path / "rewriting", [asked], [asked, answered, asked | {"content": "go on"}])
    assert "1 of 2 recorded ones start with reworded answers" in text
    assert "Cause: the agent rewrites its history" in text
    text = conversations(tmp_path / "single", [asked], [asked | {"content": "y"}])
    assert "replaces its history with a summary: let it do so rarely; or it asks single questions" in text
    branch = [asked, {"role": "assistant", "content": "an answer"}, asked | {"content": "go on"}]
    assert "the agent rewrites its history; or" in conversations(tmp_path / "one", branch)


@pytest.mark.parametrize(
    ("reason", "said"), [("tools_changed", "the same ones in every call"), ("shrunk", "see docs/agents/exactness.md")]
)
def test_broken_conversations_name_a_reason_and_its_cure(reason: str, said: str) -> None:
    diagnosis = Diagnosis(TABLES)
    breaks = {"segment_breaks": 60.0, f"segment_breaks/{reason}": 50.0, "segment_breaks/bridge_none": 10.0}
    for step in (1, 2, 3):
        diagnosis.step({"step": step, **HEALTHY, **AGENT, **breaks})
    [finding] = diagnosis.findings
    assert f"often with reason {reason}" in finding.seen
    assert said in finding.text("RUN")


def test_answers_that_cannot_be_read_leave_the_usual_causes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting()], metrics=[{"step": one, **HEALTHY, **NEVER} for one in (1, 2, 3)])
    (run / "groups.jsonl").write_text("{}\n", encoding="utf-8")
    assert "too hard" in of_folder(run).findings[0].text(run)


def state(run: Path, step: int, steps: int = 8) -> TrainerState:
    config = RunConfig(**{"workflow": "sort", "backend": "local", "training": {"steps": steps}})
    return TrainerState(config=config, run_dir=run, incarnation=0, step=step, weight_version=step, epoch=0)


def test_a_warning_is_said_once_and_taken_back(tmp_path: Path) -> None:
    said = [warnings_of_runs.lines(state(tmp_path, 0), {}, {})]
    for step, row in enumerate([NEVER] * 5 + [{}] * 3, 1):
        said.append(warnings_of_runs.lines(state(tmp_path, step), {"step": step, **HEALTHY, **row}, {}))
    assert [bool(lines) for lines in said] == [step in (3, 8) for step in range(9)]
    assert said[3][0].startswith("warning: no rollout solves its task")
    assert all(len(line) <= 80 for line in said[3])
    assert said[8] == ["no longer: nobody solves it (step 8)"]


def test_a_resumed_run_goes_on_with_what_was_seen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics=[{"step": step, **HEALTHY, **NEVER} for step in (1, 2)])
    warnings_of_runs.lines(state(run, 2), {}, {})
    assert "since step 1" in " ".join(warnings_of_runs.lines(state(run, 3), {"step": 3, **HEALTHY, **NEVER}, {}))


def test_sampled_answers_are_shown_when_they_are_due(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "sort: dbca\n\x1b[31m" + "x" * 400}]
    groups = [
        sorting(step=2),
        sorting(step=4),
        group([rollout(0, [recorded_runs.step(long, "a" * 300)], 1.0)], step=4, outcome="validation"),
        group([rollout(0, [recorded_runs.step(long, "a" * 300)], 1.0), rollout(1, [], None)], step=4),
    ]
    run = write_run(tmp_path / "run", groups)

    def shown(step: int, every: int) -> list[str]:
        now = state(run, step)
        training = now.config.training.model_copy(update={"answers_table_every_steps": every})
        return answers_table.lines(replace(now, config=now.config.model_copy(update={"training": training})))

    assert shown(4, 0) == []
    assert shown(3, 2) == []
    assert shown(6, 2) == []  # nothing was recorded
    title, head, right, wrong, *others = shown(4, 4)
    assert (title, head.split()) == ("answers of step 4:", ["reward", "question", "expected", "answer"])
    assert (right.split(), wrong.split()) == (["1", "sort:", "dbca", "abcd", "abcd"], ["0.250", "abdc"])
    assert others[-1].split()[0] == "-"  # a rollout without a model call
    assert len(others) < 30
    for line in (title, head, right, wrong, *others):
        assert line.isprintable()
        assert len(line) <= 80


def written(tmp_path: Path, *rows: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    metrics = [{"step": step, **HEALTHY, **row} for step, row in enumerate(rows, 1)]
    run = write_run(tmp_path / "run", [sorting(step=len(rows))], metrics=metrics)
    summary = {"status": "completed", "optimizer_steps": len(rows), "validation": [], "books_by_reason": {}}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run, summary


def test_the_closing_lines_of_a_healthy_run(tmp_path: Path) -> None:
    run, summary = written(tmp_path, {"solved": 0.1}, {"solved": 0.9})
    text = "\n".join(closing.lines(run, summary))
    assert "solved 10% -> 90%" in text
    assert 'best  reward 1: "sort: dbca" -> "abcd"' in text
    assert 'worst reward 0.250: "sort: dbca" -> "abdc"' in text
    assert "warning" not in text
    assert text.count("  rllm-core ") == 3
    assert f"  rllm-core eval --checkpoint {run}" in text
    without_calls = {**summary, "costs": {"by_kind": {"training": {"calls": 2}}}}
    assert f"  rllm-core eval WORKFLOW --checkpoint {run}" in closing.lines(run, without_calls), "as of sft"


def test_nobody_overlooks_that_nothing_was_trained(tmp_path: Path) -> None:
    run, summary = written(tmp_path, *[NEVER] * 4)
    lines = closing.lines(run, summary)
    assert any(line.startswith("NOTHING WAS TRAINED") for line in lines)
    assert any(line.startswith("warning: no rollout solves its task") for line in lines)
    assert "NOTHING WAS TRAINED" in called(diagnose, run).output
    data = json.loads(called(diagnose, run, "--json").output)
    assert data["nothing_trained"]
    assert [(one["name"], one["since_step"]) for one in data["findings"]] == [("nobody-solves-it", 1)]
    assert data["findings"][0]["page"].endswith("what-went-wrong.md#nobody-solves-it")


def test_every_finding_has_its_section() -> None:
    page = (Path(__file__).parents[3] / "docs" / "what-went-wrong.md").read_text(encoding="utf-8")
    sections = {line[3:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}
    named = {name for name, *_ in TROUBLES} | {"warm-up-longer-than-the-run", "rollouts-failing"}
    assert named == sections


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json"])
def test_a_damaged_run_is_one_line(tmp_path: Path, file: str) -> None:
    run, _ = written(tmp_path, {})
    (run / file).write_text("[1]\n", encoding="utf-8")
    result = called(diagnose, run)
    assert result.exit_code == 1
    assert "is damaged" in str(result.exception)


def test_metrics_that_are_missing_are_no_good_sign(tmp_path: Path) -> None:
    run, summary = written(tmp_path, {}, {})
    (run / "summary.json").write_text(json.dumps({**summary, "optimizer_steps": 2}), encoding="utf-8")
    assert called(diagnose, run).exit_code == 0
    (run / "metrics.jsonl").unlink()
    result = called(diagnose, run)
    assert result.exit_code == 1
    assert "metrics.jsonl is damaged: it has 0 of 2 steps" in str(result.exception)


def test_a_run_that_failed_before_it_wrote_its_last_step_is_not_damaged(tmp_path: Path) -> None:
    run, summary = written(tmp_path, {}, {})
    (run / "summary.json").write_text(json.dumps({**summary, "status": "failed", "optimizer_steps": 3}), "utf-8")
    assert called(diagnose, run).exit_code == 0
    (run / "summary.json").write_text(json.dumps({**summary, "status": "failed", "optimizer_steps": 4}), "utf-8")
    assert "metrics.jsonl is damaged: it has 2 of 4 steps" in str(called(diagnose, run).exception)


def test_commands_quote_the_folder() -> None:
    finding = Finding("name", None, "seen", ("cause",), "rllm-core show RUN")
    assert "rllm-core show 'my run'" in finding.text("my run")
    assert finding.to_json("my run")["decides"] == "rllm-core show 'my run'"
