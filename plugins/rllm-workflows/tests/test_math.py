from __future__ import annotations

import asyncio
import json
import re
import sys

import pytest
from pydantic import ValidationError
from rllm_workflows import math as math_workflow
from rllm_workflows.math import ASK_FOR_BOX, MathConfig, MathWorkflow

from rllm_core.engine import TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.sandbox import ChildRaised
from rllm_core.types import Task, TerminationReason


def task(answer, problem="1+1"):
    return Task(task_id="t", data={"problem": problem, "answer": answer})


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count, **more):
    return [{"problem": f"{i} + {i}", "answer": str(2 * i), **more} for i in range(count)]


@pytest.fixture
def workflow():
    made = MathWorkflow()
    yield made
    asyncio.run(made.close())


@pytest.mark.parametrize(
    ("said", "wanted", "is_correct", "answered"),
    [
        (r"It is \boxed{\dfrac{1}{2}}.", "0.5", True, 1.0),
        ("#### 1,000", "1000", True, 1.0),
        ("73", "73", True, 1.0),
        ("74", "73", False, 1.0),
        (r"\boxed{2,1}", "1, 2", True, 1.0),
        (r"\boxed{73} or 74", "74", False, 1.0),
        ("no idea", "73", False, 0.0),
        (r"\boxed{}", "73", False, 0.0),
        (r"9^{9^{9^9}} = \boxed{9^{9^{9^9}}}", "73", False, 1.0),
    ],
)
def test_rewards(play, workflow, said, wanted, is_correct, answered):
    episode, _ = play(workflow, task(wanted), said)
    assert episode.trajectories[0].total_reward == float(is_correct)
    assert episode.is_correct is is_correct
    assert episode.termination_reason is TerminationReason.DONE
    assert episode.metrics == {"answered": answered, "grader_timeouts": 0.0}


def test_what_was_cut_off_has_no_answer(play, workflow):
    episode, _ = play(workflow, task("73"), "73[cut off]")
    assert not episode.is_correct
    assert episode.trajectories[0].total_reward == 0.0
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_TOKENS


def together(make_workflow, engine_of, wanted, said):
    """Returns the outcomes of rollouts that are graded concurrently."""

    async def run():
        workflow = make_workflow()
        try:
            rollouts = (workflow.run(task(wanted), TITOCompleter(engine_of([text]))) for text in said)
            return await asyncio.gather(*rollouts, return_exceptions=True)
        finally:
            await workflow.close()

    return asyncio.run(run())


@pytest.fixture
def engine_of(play, workflow):
    _, engine = play(workflow, task("1"), "1")
    return type(engine)


@pytest.mark.slow
def test_of_64_comparisons_at_once_five_hang(monkeypatch, engine_of):
    """The comparison runs model-written regular expressions, some of which never end."""
    monkeypatch.setattr(math_workflow, "CHECK", "re:search")
    said = [r"\boxed{(a+)+$}" if i % 13 == 0 else rf"\boxed{{x{i}}}" for i in range(64)]
    episodes = together(lambda: MathWorkflow(MathConfig(check_timeout_seconds=1.0)), engine_of, "a" * 60 + "b", said)
    timeouts = [episode.metrics["grader_timeouts"] for episode in episodes]
    assert timeouts == [float(i % 13 == 0) for i in range(64)]
    assert all(episode.trajectories[0].total_reward == 0.0 for episode in episodes)


def test_a_comparison_that_crashes_is_an_error(monkeypatch, engine_of):
    monkeypatch.setattr(math_workflow, "CHECK", "re:search")
    [failed] = together(MathWorkflow, engine_of, "abc", [r"\boxed{(}"])
    assert isinstance(failed, ChildRaised)


@pytest.mark.slow
def test_math_verify_reads_what_we_cannot_and_is_killed_when_it_hangs(engine_of):
    compared = {
        r"\boxed{\sin^2 x + \cos^2 x}": (True, 0.0),
        r"\boxed{\sin(\pi/2)}": (True, 0.0),
        r"\boxed{\frac{2}{2}}": (True, 0.0),
        r"\boxed{\sin(0)}": (False, 0.0),
        r"\boxed{2}": (False, 0.0),
    }
    hang = {
        r"\boxed{\sin(9^{9^{9^9}})}": (False, 1.0),
        r"\boxed{\sum_{n=1}^{10000000000} \sin{n}}": (False, 1.0),
    }
    for said, seconds in ((compared, 600.0), (hang, 2.0)):
        config = MathConfig(symbolic=True, check_timeout_seconds=seconds)
        episodes = together(lambda config=config: MathWorkflow(config), engine_of, "1", said)
        found = [(episode.is_correct, episode.metrics["grader_timeouts"]) for episode in episodes]
        assert found == list(said.values())


def test_without_math_verify_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr(math_workflow.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rllm-workflows\[math\]'"):
        MathWorkflow(MathConfig(symbolic=True))


def test_made_up_problems(workflow):
    train, validation = workflow.tasks("train"), workflow.tasks("validation")
    assert len(train) + len(validation) == 9**3
    assert 0.15 < len(validation) / 9**3 < 0.25
    assert not {t.task_id for t in train} & {t.task_id for t in validation}
    for made in (*train, *validation):
        first, second = re.fullmatch(r"(\d+)-(\d+)\?", made.data["problem"]).groups()
        assert int(first) - int(second) == int(made.data["answer"])
    assert MathWorkflow().tasks("train") == train


def test_what_is_asked(play, workflow, tmp_path):
    _, engine = play(workflow, workflow.tasks("train")[0], "1")
    assert engine.prompts[0].startswith("user\n111-100?")
    file = write(tmp_path / "rows.jsonl", *rows(50))
    _, engine = play(MathWorkflow(MathConfig(train_file=file)), task("1"), "1")
    assert engine.prompts[0].startswith(f"system\n{ASK_FOR_BOX}user\n1+1")
    _, engine = play(MathWorkflow(MathConfig(train_file=file, instructions="")), task("1"), "1")
    assert engine.prompts[0].startswith("user\n1+1")
    _, engine = play(MathWorkflow(MathConfig(instructions="Be brief.")), task("1"), "1")
    assert engine.prompts[0].startswith("system\nBe brief.user\n1+1")


def test_rows_of_one_file_are_split_by_a_hash(tmp_path):
    file = write(tmp_path / "rows.jsonl", *rows(100), "\n")
    workflow = MathWorkflow(MathConfig(train_file=file))
    train, validation = workflow.tasks("train"), workflow.tasks("validation")
    assert len(train) + len(validation) == 100
    assert 5 <= len(validation) <= 40
    longer = write(tmp_path / "more.jsonl", {"problem": "x", "answer": 1}, *rows(100))
    again = MathWorkflow(MathConfig(train_file=longer))
    assert {t.task_id for t in validation} <= {t.task_id for t in again.tasks("validation")}


def test_fields_and_solutions_of_data_sets(tmp_path):
    gsm8k = write(tmp_path / "a.jsonl", {"question": "?", "answer": "2+2=<<2+2=4>>4\n#### 1,234"})
    math = write(
        tmp_path / "b.jsonl", {"question": "!", "answer": r"so $\boxed{\frac{1}{2}}$"}, {"question": "n", "answer": 0.5}
    )
    config = MathConfig(train_file=gsm8k, validation_file=math, problem_field="question")
    workflow = MathWorkflow(config)
    assert [t.data for t in workflow.tasks("train")] == [{"problem": "?", "answer": "1,234"}]
    assert [t.data["answer"] for t in workflow.tasks("validation")] == [r"\frac{1}{2}", "0.5"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[]", "rows.jsonl:2: not a JSON object"),
        ('{"problem": "a"}', "rows.jsonl:2: the row has no field 'answer'; it has problem"),
        ('{"answer": "a"}', "rows.jsonl:2: the row has no field 'problem'; it has answer"),
        ('{"problem": "a", "answer": true}', "rows.jsonl:2: field 'answer' must be well-formed text, got True"),
        ('{"problem": "a", "answer": null}', "rows.jsonl:2: field 'answer'"),
        ('{"problem": "a", "answer": " "}', "rows.jsonl:2: field 'answer'"),
        (r'{"problem": "\ud800", "answer": "1"}', "rows.jsonl:2: field 'problem'"),
        ('{"problem": "a", "answer": "#### "}', "rows.jsonl:2: field 'answer': an answer must have 1 to 512"),
        (json.dumps({"problem": "a", "answer": "x" * 513}), "an answer must have 1 to 512 characters, got 513"),
        ('{"problem": "0 + 0", "answer": "7"}', "rows.jsonl:2: same problem as line 1"),
    ],
)
def test_rows_that_are_wrong(tmp_path, row, message):
    file = write(tmp_path / "rows.jsonl", *rows(1), row + "\n")
    with pytest.raises(ConfigError) as wrong:
        MathWorkflow(MathConfig(train_file=file))
    assert message in str(wrong.value)


def test_files_that_are_wrong(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        MathWorkflow(MathConfig(train_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="has no rows"):
        MathWorkflow(MathConfig(train_file=write(tmp_path / "empty", "\n")))
    one = write(tmp_path / "one", *rows(1))
    with pytest.raises(ConfigError, match="too few to hold some out"):
        MathWorkflow(MathConfig(train_file=one))
    with pytest.raises(ConfigError, match=r"two:1: the problem is also in .*one:1"):
        MathWorkflow(MathConfig(train_file=one, validation_file=write(tmp_path / "two", *rows(2))))


@pytest.mark.parametrize(
    "section",
    [{"validation_file": "x"}, {"check_timeout_seconds": 0}, {"problem_field": ""}, {"train_files": "x"}],
)
def test_bad_sections(section):
    with pytest.raises(ValidationError):
        MathConfig(**section)


@pytest.mark.slow
def test_made_up_problems_are_learned(rllm_core, tmp_path):
    """Of held-out problems, at most one in ten is solved before training, and nine in ten after 70 of its 150 steps."""
    run_dir = tmp_path / "run"
    rllm_core("train", "math", "--backend", "local", "--run-dir", run_dir, "-o", "training.steps=70")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["validation"][0]["solved"] <= 0.1
    assert summary["validation"][-1]["solved"] >= 0.9
    assert summary["books"]["failed"] == 0
