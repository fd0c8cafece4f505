from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from rllm_workflows.dataset import ANSWERS_OF_OTHER_ROWS, DatasetConfig, DatasetWorkflow, graded_text, run_file
from rllm_workflows.reward_check import complaint

from rllm_core.errors import ConfigError, PluginError
from rllm_core.sandbox import ChildTimeout
from rllm_core.services import Score
from rllm_core.types import FinishReason, Step, Task, TerminationReason, thaw, token_ids
from rllm_devkit.checks.workflows import check_workflow

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ROWS = [
    {
        "n": number,
        "question": f"How much is é{number} + {number}?",
        "answer": str(2 * number),
        "rules": "Give a number.",
        "level": {"name": "easy", "of": [1, 2]},
    }
    for number in range(200)
]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def lines(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def workflow_of(source, **section):
    return DatasetWorkflow(DatasetConfig(train_file=str(source), **section))


def all_tasks(workflow):
    return {split: list(workflow.tasks(split)) for split in ("train", "validation")}


def sources(folder, rows):
    """Returns run-file sections with the same rows in every format."""
    saved, parts = folder / "saved", folder / "parts"
    datasets.Dataset.from_list(rows).save_to_disk(saved)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(parts)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=7)
    return {
        "jsonl": {"train_file": str(lines(folder / "rows.jsonl", *rows))},
        "parquet": {"train_file": str(folder / "rows.parquet")},
        "saved": {"saved": str(saved)},
        "splits": {"saved": str(parts), "train_split": "train"},
    }


def test_every_format_gives_the_same_tasks(tmp_path):
    section = {"system": "rules", "reward_columns": ("level", "n"), "held_out_share": 0.2}
    found = {
        name: all_tasks(DatasetWorkflow(DatasetConfig(**source, **section)))
        for name, source in sources(tmp_path, ROWS).items()
    }
    assert found["jsonl"] == found["parquet"] == found["saved"] == found["splits"]
    train, validation = found["jsonl"]["train"], found["jsonl"]["validation"]
    assert len(train) + len(validation) == len({task.task_id for task in [*train, *validation]}) == 200
    assert 20 <= len(validation) <= 60
    [task] = [task for task in [*train, *validation] if task.data["row"]["n"] == 7]
    assert task.data == {
        "question": "How much is é7 + 7?",
        "answer": "14",
        "system": "Give a number.",
        "row": {"level": {"name": "easy", "of": [1, 2]}, "n": 7},
    }


@pytest.mark.parametrize(
    "answers", [[1, 2, 3, 4], [1.5, 2.0, 3.25, 4.0], ["a", "b", "c", "d"], [["a"], ["b", "B"], ["c"], ["d"]]]
)
def test_every_format_gives_the_same_answers(tmp_path, answers):
    rows = [{"question": str(number), "answer": answer} for number, answer in enumerate(answers)]
    found = [
        [thaw(task.data["answer"]) for task in DatasetWorkflow(DatasetConfig(**s, held_out_share=0)).tasks("train")]
        for s in sources(tmp_path, rows).values()
    ]
    assert found == [answers] * 4
    assert [type(answer) for answer in found[1]] == [type(answer) for answer in answers]


def test_a_hub_data_set_that_is_a_folder_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "hub").mkdir()
    lines(tmp_path / "hub" / "train.jsonl", *ROWS[:20])
    lines(tmp_path / "hub" / "test.jsonl", *ROWS[20:25])
    section = {"hub_dataset": str(tmp_path / "hub"), "validation_split": "test"}
    with pytest.raises(ConfigError, match=r"needs the network: set dataset.allow_download = true"):
        DatasetWorkflow(DatasetConfig(**section))
    found = all_tasks(DatasetWorkflow(DatasetConfig(**section, allow_download=True)))
    assert [task.data["question"] for task in found["train"]] == [row["question"] for row in ROWS[:20]]
    assert len(found["validation"]) == 5
    with pytest.raises(ConfigError, match=r"split 'nowhere' cannot be loaded from the Hugging Face Hub: Unknown split"):
        DatasetWorkflow(DatasetConfig(**section | {"validation_split": "nowhere"}, allow_download=True))


def test_without_the_network_a_hub_data_set_is_one_line(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="'train' cannot be loaded from the Hugging Face Hub") as caught:
        DatasetWorkflow(DatasetConfig(hub_dataset="nobody/nothing-at-all", allow_download=True))
    assert "\n" not in str(caught.value)


def test_ids_are_those_of_the_column_and_of_the_content_without_one(tmp_path):
    path = lines(tmp_path / "rows.jsonl", *ROWS)
    by_column = workflow_of(path, id="n", held_out_share=0).tasks("train")
    assert [task.task_id for task in by_column] == [str(number) for number in range(200)]
    shuffled = lines(tmp_path / "shuffled.jsonl", *reversed(ROWS), "")
    by_content, again = (
        {task.data["question"]: task.task_id for task in workflow_of(p, held_out_share=0).tasks("train")}
        for p in (path, shuffled)
    )
    assert by_content == again
    held_out, more = (
        {task.task_id for task in workflow_of(p, id="n").tasks("validation")}
        for p in (path, lines(tmp_path / "more.jsonl", *ROWS, *({**row, "n": row["n"] + 1000} for row in ROWS)))
    )
    assert held_out < more, "rows that are added move no other row to another split"


@pytest.mark.parametrize("section", [{"id": "n"}, {"reward_columns": ("n",)}])
def test_no_question_is_in_both_splits(tmp_path, section):
    forms = (str, str.upper, lambda question: f"  {question} ".replace(" ", "\n "))
    rows = [
        {"n": f"{form}-{row['n']}", "question": change(row["question"]), "answer": str(form)}
        for form, change in enumerate(forms)
        for row in ROWS
    ]
    tasks = all_tasks(workflow_of(lines(tmp_path / "rows.jsonl", *rows), **section))
    asked = {split: {"".join(t.data["question"].casefold().split()) for t in tasks[split]} for split in tasks}
    assert not asked["train"] & asked["validation"]
    assert len(asked["validation"]) * len(forms) == len(tasks["validation"]) > 0
    assert len(tasks["train"]) + len(tasks["validation"]) == len(rows)


def test_rows_with_one_question_are_split_by_what_else_they_have(tmp_path):
    rows = [row | {"question": "Which level?"} for row in ROWS]
    workflow = workflow_of(lines(tmp_path / "rows.jsonl", *rows), reward_columns=("n",))
    assert 5 <= len(workflow.tasks("validation")) <= 40


def test_a_question_in_both_files_is_a_warning(tmp_path, caplog):
    train = lines(tmp_path / "a.jsonl", *ROWS[:9])
    again = [ROWS[9], *(row | {"question": row["question"].upper(), "answer": "other"} for row in ROWS[7:9])]
    workflow_of(train, validation_file=str(lines(tmp_path / "b.jsonl", *again)))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert re.match(r"2 of the 3 .*b\.jsonl line 2", record.getMessage())
    caplog.clear()
    workflow_of(train, validation_file=str(lines(tmp_path / "c.jsonl", ROWS[9])))
    assert not caplog.records


def test_splits_are_the_same_in_another_process(tmp_path):
    path = lines(tmp_path / "rows.jsonl", *ROWS)
    code = (
        "import sys; from rllm_workflows.dataset import *\n"
        "workflow = DatasetWorkflow(DatasetConfig(train_file=sys.argv[1]))\n"
        "print(','.join(task.task_id for task in workflow.tasks('validation')))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, path], env={"PYTHONHASHSEED": "3"}, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert there == ",".join(task.task_id for task in workflow_of(path).tasks("validation"))


def test_two_files(tmp_path):
    train, validation = lines(tmp_path / "a.jsonl", *ROWS[:9]), tmp_path / "b.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[9:12]), validation)
    workflow = workflow_of(train, validation_file=str(validation))
    assert [len(workflow.tasks(split)) for split in ("train", "validation")] == [9, 3]
    assert [task.data["answer"] for task in workflow.tasks("validation")[1:]] == ["20", "22"]
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[7:12]), validation)
    with pytest.raises(
        ConfigError, match=r"b.parquet row 1 is the same as .*a.jsonl line 8; training and validation must"
    ):
        workflow_of(train, validation_file=str(validation))


GOOD = {"question": "a?", "answer": "b"}
BAD_ROWS = [
    ({"question": "a?"}, r"line 2: 'answer' is missing; known: question"),
    ({"question": "a?", "anwser": "b"}, r"line 2: 'answer' is missing; did you mean 'anwser'\?"),
    (GOOD | {"answer": None}, r"line 2: 'answer' is null"),
    (GOOD | {"answer": "  "}, r"line 2: 'answer' is empty"),
    (GOOD | {"question": ""}, r"line 2: 'question' is empty"),
    (GOOD | {"question": 7}, r"line 2: 'question' must be text, got 7 \(int\)"),
    (GOOD | {"question": math.nan}, r"line 2: 'question' must be text, got nan \(float\)"),
    (GOOD | {"question": ["a"]}, r"line 2: 'question' must be text, got \['a'\] \(list\)"),
    (
        GOOD | {"answer": {"a": 1}},
        r"line 2: 'answer' must be text, a number or a list of texts, got \{'a': 1\} \(dict\)",
    ),
    (GOOD | {"answer": []}, r"line 2: 'answer' must be .*, got \[\] \(list\)"),
    (GOOD | {"answer": ["b", 1]}, r"line 2: 'answer' must be .*, got \['b', 1\] \(list\)"),
    (GOOD | {"answer": ["b", " "]}, r"line 2: 'answer' is empty"),
    (GOOD | {"answer": True}, r"line 2: 'answer' must be .*, got True \(bool\)"),
    (GOOD | {"answer": math.nan}, r"line 2: 'answer' must be a finite number, got nan"),
    (GOOD | {"answer": math.inf}, r"line 2: 'answer' must be a finite number, got inf"),
    (GOOD | {"answer": 3}, r"line 2: 'answer' is a number, but text in .*line 1; all answers must have the same type"),
    (GOOD | {"question": "\ud800"}, r"line 2: 'question' contains an unpaired surrogate \(\\ud800\)"),
    ("{", "line 2 is not JSON: Expecting property name"),
    ("[1]", r"line 2 is list; each line must be a JSON object"),
    ("[" * 100_000, "line 2 is not JSON"),
    (
        {"question": "first?", "answer": "b"},
        r"line 2 is the same as .*line 1; remove one, or set dataset.id to a column",
    ),
]


@pytest.mark.parametrize(("row", "complaint"), BAD_ROWS)
def test_bad_rows(tmp_path, row, complaint):
    path = lines(tmp_path / "rows.jsonl", GOOD | {"question": "first?"}, row)
    with pytest.raises(ConfigError, match=complaint) as caught:
        workflow_of(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "row", "complaint"),
    [
        (
            {"reward": "numeric"},
            {"answer": "none"},
            "'answer': 'none' does not contain a number, which reward 'numeric' needs",
        ),
        ({"question": "qestion"}, {}, "it has no column 'qestion'; did you mean 'question'"),
        ({"answer": "label"}, {}, "it has no column 'label'; known: question, answer$"),
        ({"id": "key"}, {"key": 1.5}, r"'key' must be text or an integer, got 1.5 \(float\)"),
        ({"id": "key"}, {"key": "a\nb"}, "must be one line of at most"),
        ({"id": "key"}, {"key": "k" * 300}, "must be one line of at most 256 characters"),
        ({"system": "rules"}, {"rules": 5}, r"'rules' must be text, got 5 \(int\)"),
        ({"tools": "tools"}, {"tools": "["}, "'tools' is text that is not JSON"),
        ({"tools": "tools"}, {"tools": [{"name": "add"}]}, "must be a list of"),
        ({"reward_columns": ("x",)}, {"x": [math.nan]}, r"'x' must be valid JSON, got \[nan\] \(list\)"),
    ],
)
def test_bad_columns(tmp_path, section, row, complaint):
    path = lines(tmp_path / "rows.jsonl", GOOD | row)
    with pytest.raises(ConfigError, match=f"rows.jsonl line 1: .*{complaint}|rows.jsonl line 1: {complaint}"):
        workflow_of(path, **section)


def test_a_column_of_another_name_comes_with_the_key_that_names_it(tmp_path):
    path = lines(tmp_path / "rows.jsonl", {"prompt": "sort: ba", "answer": "ab"})
    with pytest.raises(
        ConfigError, match=r"no column 'question'; known: prompt, answer; dataset\.question names another"
    ):
        workflow_of(path)


def test_ids_must_differ(tmp_path):
    rows = [{"question": str(number), "answer": "a", "key": number % 4} for number in range(6)]
    with pytest.raises(ConfigError, match=r"line 5: 'key' is the same as in .*line 1; ids must be unique"):
        workflow_of(lines(tmp_path / "rows.jsonl", *rows), id="key")


def test_columns_of_tables_are_checked_by_their_schema(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist([GOOD]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows.parquet has no column 'reply'; known: question, answer"):
        workflow_of(tmp_path / "rows.parquet", answer="reply")
    datasets.Dataset.from_list([GOOD]).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"saved has no column 'anwser'; did you mean 'answer'"):
        DatasetWorkflow(DatasetConfig(saved=str(tmp_path / "saved"), answer="anwser"))


def test_cells_that_are_no_text_are_refused_by_name(tmp_path):
    day = pyarrow.Table.from_pydict({"question": ["a?"], "answer": pyarrow.array([0], pyarrow.date32())})
    parquet.write_table(day, tmp_path / "rows.parquet")
    with pytest.raises(
        ConfigError, match=r"rows.parquet row 1: 'answer' must be .*, got datetime.date\(1970, 1, 1\) \(date\)"
    ):
        workflow_of(tmp_path / "rows.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([GOOD, GOOD | {"answer": None}]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows.parquet row 2: 'answer' is null"):
        workflow_of(tmp_path / "rows.parquet")


def test_encodings(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert workflow_of(path, held_out_share=0).tasks("train")[0].data["question"] == "a?"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "caf\xe9", "answer": "b"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl line 2 is not UTF-8: byte 0xe9 at position 18"):
        workflow_of(path)
    path.write_bytes(json.dumps(GOOD).encode("utf-16"))
    with pytest.raises(ConfigError, match=r"rows.jsonl line 1 is not UTF-8: byte 0xff at position 1"):
        workflow_of(path)


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({}, "dataset needs exactly one of train_file, saved and hub_dataset: none is set"),
        ({"train_file": "a.jsonl", "saved": "b"}, "needs exactly one of .*: set only one of train_file and saved"),
        ({"train_file": "nowhere.jsonl"}, "nowhere.jsonl does not exist in the working directory /"),
        ({"train_file": "."}, ". does not exist, or is not a file"),
        ({"train_file": __file__}, "must end in .jsonl or .parquet"),
        ({"saved": "nowhere"}, "nowhere does not exist, or was not written by save_to_disk"),
        ({"saved": "."}, ". cannot be opened as a saved dataset"),
        (
            {"train_file": "a.jsonl", "validation_split": "test"},
            "dataset.validation_split applies to saved or hub_dataset",
        ),
        ({"saved": "a", "validation_file": "b"}, "dataset.validation_file applies to train_file, not to saved"),
        ({"saved": "a", "allow_download": True}, "dataset.allow_download applies to hub_dataset, not to saved"),
    ],
)
def test_bad_sections(section, complaint):
    with pytest.raises(ConfigError, match=complaint):
        DatasetWorkflow(DatasetConfig(**section))


def test_splits_that_are_not_there(tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "parts")
    with pytest.raises(ConfigError, match="has no split 'trian'; did you mean 'train'"):
        DatasetWorkflow(DatasetConfig(saved=str(tmp_path / "parts"), train_split="trian"))
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"has no splits; unset dataset.validation_split"):
        DatasetWorkflow(DatasetConfig(saved=str(tmp_path / "one"), validation_split="test"))
    with pytest.raises(ConfigError, match=r"has no splits; unset dataset.train_split"):
        DatasetWorkflow(DatasetConfig(saved=str(tmp_path / "one"), train_split="test"))


def test_empty_and_too_small_files(tmp_path):
    with pytest.raises(ConfigError, match=r"empty.jsonl has no rows"):
        workflow_of(lines(tmp_path / "empty.jsonl", "", " "))
    parquet.write_table(pyarrow.Table.from_pylist([GOOD]).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(ConfigError, match=r"empty.parquet has no rows"):
        workflow_of(tmp_path / "empty.parquet")
    datasets.Dataset.from_list([GOOD]).select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"none has no rows, or a split without rows"):
        DatasetWorkflow(DatasetConfig(saved=str(tmp_path / "none")))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"broken.parquet cannot be read as Parquet") as caught:
        workflow_of(tmp_path / "broken.parquet")
    assert "\n" not in str(caught.value)
    one = lines(tmp_path / "one.jsonl", GOOD)
    with pytest.raises(ConfigError, match=r"one.jsonl: 1 row, too few .* to hold 0.1 of them out"):
        workflow_of(one)
    assert len(workflow_of(one, held_out_share=0).tasks("train")) == 1


def test_a_file_that_changes_under_a_run_is_an_error(tmp_path):
    path = lines(tmp_path / "rows.jsonl", *ROWS[:3])
    tasks = workflow_of(path, held_out_share=0).tasks("train")
    lines(path, *(row | {"answer": str(int(row["answer"]) + 1)} for row in ROWS[:3]))
    with pytest.raises(ConfigError, match=r"rows.jsonl line 2 has changed since the run started"):
        tasks[1]


@pytest.mark.parametrize(("extra", "module"), [("parquet", "pyarrow"), ("huggingface", "datasets")])
def test_a_missing_library_is_one_line_with_the_command(tmp_path, monkeypatch, extra, module):
    parquet.write_table(pyarrow.Table.from_pylist([GOOD]), tmp_path / "rows.parquet")
    source = {"train_file": str(tmp_path / "rows.parquet")} if module == "pyarrow" else {"saved": str(tmp_path)}
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install 'rllm-workflows\[{extra}\]'$"):
        DatasetWorkflow(DatasetConfig(**source))


# --------------------------------------------------------------------------------------------------------------------
# Rollouts


def played(workflow, *rollouts):
    """Runs pairs of task and completer, and returns their episodes."""
    return asyncio.run(_played(workflow, rollouts))


async def _played(workflow, rollouts):
    try:
        await workflow.open()
        return [await workflow.run(task, completer) for task, completer in rollouts]
    finally:
        await workflow.close()
        await workflow.services.close()


def test_an_episode(tmp_path, make_completer):
    path = lines(tmp_path / "rows.jsonl", *ROWS[:3])
    workflow = workflow_of(path, system="rules", held_out_share=0, reward="numeric")
    engine, completer = make_completer("It is 4.")
    [episode] = played(workflow, (workflow.tasks("train")[2], completer))
    assert episode.trajectories[0].total_reward == 1.0
    assert episode.is_correct is True
    assert episode.termination_reason is TerminationReason.DONE
    assert [m["role"] for m in episode.trajectories[0].steps[0].messages] == ["system", "user"]
    assert "Give a number." in engine.prompts[0]
    assert "How much is é2 + 2?" in engine.prompts[0]


def test_a_reward_below_solved_at_and_a_cut_off_answer(tmp_path, make_completer):
    path = lines(tmp_path / "rows.jsonl", {"question": "colours?", "answer": "red green blue"})
    workflow = workflow_of(path, held_out_share=0, reward="f1", solved_at=0.5)
    [task] = workflow.tasks("train")
    completers = [make_completer(answer)[1] for answer in ("green", "yellow[cut off]")]
    solved, episode = played(workflow, *((task, completer) for completer in completers))
    assert solved.is_correct is True
    assert (episode.is_correct, episode.trajectories[0].total_reward) == (False, 0.0)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_TOKENS


@pytest.mark.parametrize(
    ("said", "is_of_another"),
    [("4", 0.0), ("6", 1.0), (" 6 ", 1.0), ("So it is 6", 1.0), ("Three?\n6", 1.0), ("17", 0.0), ("6 or so", 0.0)],
)
def test_wrong_answers_that_belong_to_other_rows_are_counted(tmp_path, make_completer, said, is_of_another):
    workflow = workflow_of(lines(tmp_path / "rows.jsonl", *ROWS[:5]), held_out_share=0)
    [episode] = played(workflow, (workflow.tasks("train")[2], make_completer(said)[1]))
    assert episode.metrics == {ANSWERS_OF_OTHER_ROWS: is_of_another}


def test_an_unknown_reward_is_an_error_before_anything_is_allocated(tmp_path):
    workflow = workflow_of(lines(tmp_path / "rows.jsonl", *ROWS), reward="exact_mach")
    with pytest.raises(PluginError, match="no reward function named 'exact_mach'; did you mean 'exact_match'"):
        workflow.tasks("train")


def test_a_reward_function_that_cannot_read_the_rows_says_so_before_the_first_rollout(tmp_path, make_completer):
    workflow = workflow_of(lines(tmp_path / "rows.jsonl", GOOD), held_out_share=0)
    workflow.services.reward_function = lambda name, limits: failing
    _, completer = make_completer("b")

    async def failing(task, text):
        raise ChildTimeout("graded took longer than 10 s")

    with pytest.raises(
        ConfigError, match=r"dataset.reward = 'exact_match' fails on the first row with an empty text: gra"
    ):
        played(workflow, (workflow.tasks("train")[0], completer))


def test_tool_calls_are_graded_as_lines_of_json():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    step = {"prompt_ids": token_ids([1]), "completion_ids": token_ids([2]), "finish_reason": FinishReason.STOP}
    only = Step(response={"role": "assistant", "content": "", "tool_calls": [call]}, **step)
    assert graded_text(only) == '{"name": "add", "arguments": {"a": 1}}'
    both = Step(response={"role": "assistant", "content": "So:", "tool_calls": [call, call]}, **step)
    assert graded_text(both).split("\n") == ["So:", graded_text(only), graded_text(only)]


def test_tools_reach_the_model(tmp_path, make_completer):
    rows = [GOOD | {"tools": json.dumps([TOOL])}, {"question": "b?", "answer": "b", "tools": json.dumps([])}]
    workflow = workflow_of(lines(tmp_path / "rows.jsonl", *rows), tools="tools", held_out_share=0)
    asked = []

    class Asked:
        async def complete(self, messages, *, tools=None):
            asked.append(tools)
            return await make_completer("b")[1].complete(messages)

    played(workflow, *((task, Asked()) for task in workflow.tasks("train")))
    assert asked == [[TOOL], []]


@pytest.mark.slow
def test_it_keeps_the_contract(tmp_path):
    path = lines(tmp_path / "rows.jsonl", *ROWS)
    results = asyncio.run(check_workflow(lambda: workflow_of(path, reward="numeric"), answers=["4", "no"]))
    assert not [result for result in results if result.outcome == "failed"]


@pytest.mark.slow
def test_of_many_rows_little_stays_in_memory(tmp_path):
    code = (
        "import sys, tracemalloc, gc\n"
        "from rllm_workflows.dataset import *\n"
        "tracemalloc.start()\n"
        "workflow = DatasetWorkflow(DatasetConfig(train_file=sys.argv[1]))\n"
        "gc.collect()\n"
        "print(tracemalloc.get_traced_memory()[0], len(workflow.tasks('train')) + len(workflow.tasks('validation')))"
    )
    rows = ({"question": f"{number}?" + "x" * 300, "answer": "b"} for number in range(20_000))
    path = lines(tmp_path / "rows.jsonl", *rows)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    kept, count = map(int, done.stdout.split())
    assert count == 20_000
    assert kept < 60 * count + 2_000_000, "places and hashes, and not the 6 MB of text"
    assert Path(path).stat().st_size > 6_000_000


@pytest.mark.parametrize(
    ("given", "learning_rate", "reason"),
    [
        ({}, 1e-3, "settings for the starter model"),
        ({"model": {"path": ""}}, 1e-3, "settings for the starter model"),
        ({"model": {"path": "some/model"}}, 2e-5, "settings for a small instruction-tuned model"),
    ],
)
def test_settings_depend_on_the_model(given: dict[str, Any], learning_rate: float, reason: str) -> None:
    preset = run_file(given)
    assert preset.tables["optimizer"]["learning_rate"] == learning_rate
    assert reason in preset.reason


@pytest.mark.parametrize(
    ("reward", "is_wrong"), [("exact_match", False), ("numeric", False), ("f1", False), ("always", True)]
)
def test_a_reward_that_does_not_prefer_the_right_answer_is_named(tmp_path, caplog, reward, is_wrong):
    source = lines(tmp_path / "rows.jsonl", *ROWS[:40])
    if reward == "always":
        reward = f"{tmp_path / 'score.py'}:always"
        (tmp_path / "score.py").write_text("def always(task, text):\n    return 0.0\n")
    workflow = workflow_of(source, reward=reward)

    async def opened():
        await workflow.open()
        await workflow.services.close()

    asyncio.run(opened())
    named = [record.getMessage() for record in caplog.records if "another row's answer" in record.getMessage()]
    assert len(named) == is_wrong


def test_the_complaint_knows_common_formats_and_never_raises():
    tasks = [Task(task_id=str(n), data={"question": "?", "answer": [str(n)]}) for n in range(3)]

    async def boxed(task, text):
        return Score(text == f"\\boxed{{{task.data['answer'][0]}}}")

    async def anything(task, text):
        return Score(1.0)

    async def fails(task, text):
        raise ValueError("no")

    assert asyncio.run(complaint(boxed, tasks)) is None
    assert asyncio.run(complaint(fails, tasks)) is None
    assert "another row's answer 1" in asyncio.run(complaint(anything, tasks))
