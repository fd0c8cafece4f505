from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError
from rllm_workflows.countdown import CountdownConfig, CountdownWorkflow, extract_answer, score

from rllm_core.errors import ConfigError
from rllm_core.types import Task, TerminationReason

SMALL = CountdownConfig(train_tasks=300, validation_tasks=50)
ROW = {"question": "Make 24 of 4, 6, 1.", "target": 24, "nums": [4, 6, 1], "ground_truth": "4 * 6 * 1"}


def write_rows(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>4 * 6 * 1</answer>", 1.0),
        ("4*6*1", 1.0),
        ("First I try. <answer>(4 - 1) * 6</answer> No. <answer>\n6 * 4 / 1\n</answer>", 1.0),
        ("<answer>6 * 4 / 1</answer> or rather <answer>6 + 4 + 1</answer>", 0.1),
        ("6 * (4 - 1)", 0.1),
        ("4 / 6 / 1", 0.1),
        ("24", 0.0),
        ("4 * 6", 0.0),
        ("4 * 6 * 1 * 1", 0.0),
        ("4 * 6 = 24", 0.0),
        ("46 - 1", 0.0),
        ("<answer>4 * 6 * 1", 0.0),
        ("</answer>4 * 6 * 1<answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("4 / (6 - 6) + 1", 0.0),
        ("6 / (1 - 1) * 4", 0.0),
        ("9**9**9", 0.0),
        ("<answer>__import__('os').abort()</answer>", 0.0),
        ("<answer>" * 50_000, 0.0),
        ("<answer>" + "(" * 50_000 + "</answer>", 0.0),
        ("1" * 1_000_000, 0.0),
        ("４*６*１", 0.0),  # noqa: RUF001
        ("", 0.0),
    ],
)
def test_rewards(text, reward):
    assert score(text, target=24, nums=[4, 6, 1]) == reward


def test_division_by_zero_with_the_right_numbers_is_wrong():
    assert score("4 / (1 - 1)", target=4, nums=[1, 4, 1]) == 0.0


def test_the_last_complete_answer_counts():
    assert extract_answer("<answer>1</answer><answer>2</answer><answer>3") == "2"
    assert extract_answer("no tag") == "no tag"
    assert extract_answer("<answer>never closed") is None


def test_an_episode(play):
    task = Task(task_id="countdown-24", data=ROW)
    episode, engine = play(CountdownWorkflow(SMALL), task, "<answer>4 * 6 * 1</answer>")
    assert ROW["question"] in engine.prompts[0]
    assert episode.trajectories[0].total_reward == 1.0
    assert episode.is_correct is True
    assert episode.termination_reason is TerminationReason.DONE
    episode, _ = play(CountdownWorkflow(SMALL), task, "<answer>4 * 6 *[cut off]")
    assert (episode.trajectories[0].total_reward, episode.is_correct) == (0.0, False)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_TOKENS


def identities(tasks):
    return {(task.data["target"], tuple(sorted(task.data["nums"]))) for task in tasks}


def test_made_up_tasks_are_solvable_and_the_splits_disjoint():
    workflow = CountdownWorkflow(SMALL)
    train, validation = workflow.tasks("train"), workflow.tasks("validation")
    assert (len(train), len(validation)) == (300, 50)
    assert len(identities(train)) == 300
    assert not identities(train) & identities(validation)
    assert len({task.task_id for task in [*train, *validation]}) == 350
    for task in [*train, *validation]:
        assert set(task.data) == {"question", "target", "nums", "ground_truth"}
        assert score(task.data["ground_truth"], target=task.data["target"], nums=task.data["nums"]) == 1.0
        assert str(task.data["target"]) in task.data["question"]


def test_asking_for_more_tasks_keeps_the_first_ones():
    more = CountdownWorkflow(CountdownConfig(train_tasks=600, validation_tasks=50))
    assert CountdownWorkflow(SMALL).tasks("train") == more.tasks("train")[:300]


def test_made_up_tasks_are_the_same_in_another_process():
    code = (
        "from rllm_workflows.countdown import *\n"
        "workflow = CountdownWorkflow(CountdownConfig(train_tasks=300, validation_tasks=50))\n"
        "print(','.join(task.task_id for split in ('train', 'validation') for task in workflow.tasks(split)))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "3"}, capture_output=True, text=True, check=True
    ).stdout.strip()
    workflow = CountdownWorkflow(SMALL)
    assert there == ",".join(t.task_id for split in ("train", "validation") for t in workflow.tasks(split))


def test_ranges_that_cannot_make_the_tasks_are_refused():
    config = CountdownConfig(numbers=2, largest=2, largest_target=2)
    with pytest.raises(ConfigError, match="request fewer tasks or widen the ranges"):
        CountdownWorkflow(config).tasks("train")


def test_one_file_is_split_without_overlap(tmp_path):
    rows = [task.data for task in CountdownWorkflow(SMALL).tasks("train")]
    rows += [task.data for task in CountdownWorkflow(SMALL).tasks("validation")]
    workflow = CountdownWorkflow(CountdownConfig(train_file=write_rows(tmp_path / "rows.jsonl", *rows)))
    train, validation = workflow.tasks("train"), workflow.tasks("validation")
    assert len(train) + len(validation) == 350
    assert identities(validation) == identities(CountdownWorkflow(SMALL).tasks("validation"))
    assert not identities(train) & identities(validation)


def test_a_file_too_small_to_split_is_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROW)
    with pytest.raises(ConfigError, match=r"rows.jsonl: 1 row, too few to hold some out"):
        CountdownWorkflow(CountdownConfig(train_file=path)).tasks("train")


def test_two_files(tmp_path):
    other = ROW | {"target": 25}
    config = CountdownConfig(
        train_file=write_rows(
            tmp_path / "train.jsonl", ROW, "", ROW | {"target": 23, "source": "extra fields are fine"}
        ),
        validation_file=write_rows(tmp_path / "validation.jsonl", other),
    )
    workflow = CountdownWorkflow(config)
    assert [task.data["target"] for task in workflow.tasks("train")] == [24, 23]
    assert [task.data for task in workflow.tasks("validation")] == [other]


def test_the_same_task_in_both_files_is_refused(tmp_path):
    config = CountdownConfig(
        train_file=write_rows(tmp_path / "train.jsonl", ROW | {"target": 3}, ROW),
        validation_file=write_rows(tmp_path / "validation.jsonl", ROW | {"nums": [1, 4, 6]}),
    )
    with pytest.raises(ConfigError, match=r"validation.jsonl:1: the task is also in .*train.jsonl:2"):
        CountdownWorkflow(config).tasks("train")


@pytest.mark.parametrize("field", ["question", "target", "nums", "ground_truth"])
def test_a_row_without_a_field_names_file_line_and_field(tmp_path, field):
    bad = {key: value for key, value in ROW.items() if key != field}
    path = write_rows(tmp_path / "rows.jsonl", ROW, bad)
    with pytest.raises(ConfigError, match=rf"rows.jsonl:2: the row has no field '{field}'") as caught:
        CountdownWorkflow(CountdownConfig(train_file=path)).tasks("train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (ROW | {"target": "24"}, r"rows.jsonl:1: field 'target'"),
        (ROW | {"target": True}, r"rows.jsonl:1: field 'target'"),
        (ROW | {"target": 10**30}, r"rows.jsonl:1: field 'target'"),
        (ROW | {"nums": [1, "2"]}, r"rows.jsonl:1: field 'nums.1'"),
        (ROW | {"nums": [-1]}, r"rows.jsonl:1: field 'nums.0'"),
        (ROW | {"nums": []}, r"rows.jsonl:1: field 'nums'"),
        (ROW | {"question": ""}, r"rows.jsonl:1: field 'question'"),
        ("[1, 2]", r"rows.jsonl:1: not a JSON object"),
        ("{not json", r"rows.jsonl:1: not a JSON object"),
    ],
)
def test_bad_rows(tmp_path, row, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        CountdownWorkflow(CountdownConfig(train_file=write_rows(tmp_path / "rows.jsonl", row))).tasks("train")
    assert "\n" not in str(caught.value)


def test_a_repeated_task_is_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROW, ROW | {"nums": [6, 4, 1]})
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: same task as line 1"):
        CountdownWorkflow(CountdownConfig(train_file=path)).tasks("train")


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.jsonl cannot be read"):
        CountdownWorkflow(CountdownConfig(train_file=tmp_path / "nowhere.jsonl")).tasks("train")
    with pytest.raises(ConfigError, match=r"empty.jsonl has no rows"):
        CountdownWorkflow(CountdownConfig(train_file=write_rows(tmp_path / "empty.jsonl"))).tasks("train")


def test_a_validation_file_needs_a_training_file(tmp_path):
    with pytest.raises(ValidationError, match="validation_file needs train_file"):
        CountdownConfig(validation_file=tmp_path / "rows.jsonl")
