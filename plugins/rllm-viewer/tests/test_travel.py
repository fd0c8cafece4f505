"""``export`` and ``import``: which rollouts travel, what is printed, and what is refused."""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from recorded_runs import called, failed, group, rollout, shown, sorting, step, write_run
from travelers import exported, imported, rows_of

from rllm_core.errors import ConfigError, RunError
from rllm_core.types import PlacedMedia, Task
from rllm_viewer.commands.export import FORMATS as NAMES
from rllm_viewer.commands.export import export
from rllm_viewer.commands.import_ import import_
from rllm_viewer.travel.formats import FORMATS
from rllm_viewer.view.index import RunIndex

ASKED = [{"role": "user", "content": "ask"}]


def several(path: Path) -> Path:
    """A run with groups of four steps; the rollouts of each have rewards 0.5, 1 and 0.2."""

    def at(number: int, **more: Any) -> Any:
        rewards = [(0.5, False), (1.0, True), (0.2, False)]
        rollouts = [
            rollout(i, [step(ASKED, "yes")], reward, 0.1, is_correct=solved, rollout_id=f"{number}-{i}", **more)
            for i, (reward, solved) in enumerate(rewards)
        ]
        fields = {"outcome": "validation", "reason": "validation", "group": None} if more else {"group": number}
        return group(rollouts, step=number, task=Task(task_id=f"task-{number}", data={"answer": "yes"}), **fields)

    return write_run(path, [at(1), at(2), at(3, is_validation=True, outcome="validation"), at(4)])


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], [f"{at}-{i}" for at in (1, 2, 3, 4) for i in (0, 1, 2)]),
        (["--best"], ["1-1", "2-1", "3-1", "4-1"]),
        (["--solved"], ["1-1", "2-1", "3-1", "4-1"]),
        (["--reward-above", "0.3"], [f"{at}-{i}" for at in (1, 2, 3, 4) for i in (0, 1)]),
        (["--steps", "2", "--best"], ["2-1"]),
        (["--steps", "2-3", "--best"], ["2-1", "3-1"]),
        (["--steps", "3-", "--best"], ["3-1", "4-1"]),
        (["--steps", "-2", "--best"], ["1-1", "2-1"]),
        (["--task", "task-4", "--best"], ["4-1"]),
        (["--split", "validation", "--best"], ["3-1"]),
        (["--split", "training", "--best"], ["1-1", "2-1", "4-1"]),
    ],
)
def test_filters_choose_rollouts(tmp_path: Path, filters: list[str], expected: list[str]) -> None:
    run, out = several(tmp_path / "run"), tmp_path / "rows.jsonl"
    result = called(export, run, out, "--to", "sft", *filters, "--json")
    assert result.exit_code == 0, result.exception
    assert [row["rollout_id"] for row in rows_of(out)] == expected
    assert json.loads(result.output)["rollouts"] == len(expected)


@pytest.mark.parametrize("steps", ["", "-", "a", "1-b", "1-2-3", "1.5"])
def test_steps_that_are_no_range_are_refused(tmp_path: Path, steps: str) -> None:
    error = called(export, several(tmp_path / "run"), tmp_path / "o.jsonl", "--to", "sft", "--steps", steps).exception
    assert isinstance(error, ConfigError)
    assert "must be a step or a range" in str(error)


def test_a_folder_has_a_file_per_split(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    found = exported(run, tmp_path / "set", "hf", best=True)
    assert [len(rows_of(tmp_path / "set" / f"{name}.jsonl")) for name in ("train", "validation")] == [3, 1]
    assert found["rows"] == 4
    exported(run, tmp_path / "one", "sft", split="training")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["train.jsonl"]


def test_what_is_left_out_is_printed_by_kind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(), failed(step=5, group=188)])
    (run / "summary.json").write_text('{"status": "completed"}')
    result = called(export, run, tmp_path / "rows.jsonl", "--to", "openai")
    lines = result.output.splitlines()
    assert lines[0].startswith("2 rows: ")
    at = lines.index("of 3 rollouts in 2 groups")
    assert lines[at + 1] == "left out, because format openai cannot hold it:"
    assert "        2  step.logprobs" in lines
    assert "        1  rollout (without a model call)" in lines
    result = called(import_, tmp_path / "rows.jsonl", tmp_path / "back", "--from", "openai")
    assert result.output.splitlines()[0] == "2 rows: 2 rollouts in 2 groups"
    assert "".join(result.output.splitlines()[1:]) == (
        f"to look at it: rllm-core view {tmp_path / 'back'}in the terminal: rllm-core show {tmp_path / 'back'}"
    )
    assert "abdc" in shown(tmp_path / "back", "--task", "rows.jsonl line 2")


def test_text_gets_no_tokens_and_no_log_probabilities(tmp_path: Path) -> None:
    document = {
        "schema_version": "ATIF-v1.4",
        "session_id": "s1",
        "agent": {"name": "other", "version": "9"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "ask"},
            {"step_id": 2, "source": "agent", "message": "yes", "metrics": {"logprobs": [-0.5], "cost_usd": 0.1}},
        ],
        "notes": "a note",
    }
    (tmp_path / "one.json").write_text(json.dumps(document))
    found = imported(tmp_path / "one.json", tmp_path / "back", "atif")
    assert found["lost"] == {
        "step.logprobs (without the ids of their tokens)": 1,
        "step.metrics.cost_usd": 1,
        "trajectory.notes": 1,
    }
    text = shown(tmp_path / "back", "--rollout", 0)
    assert "yes" in text
    [chosen] = json.loads(shown(tmp_path / "back", "--best", "--json"))["chosen"]["rollouts"]
    [trajectory] = chosen["episode"]["trajectories"]
    [one] = trajectory["steps"]
    assert (one["logprobs"], one["prompt_ids"], one["completion_ids"]) == (None, [], [])
    assert (trajectory["role"], trajectory["reward"], chosen["outcome"]) == ("other", None, "imported")


def test_traces_of_others_become_groups(tmp_path: Path) -> None:
    def node(role: str, content: str, parent: int | None, **more: Any) -> dict[str, Any]:
        return {"parent": parent, "message": {"role": role, "content": content}, **more}

    def line(name: str, reward: float) -> dict[str, Any]:
        nodes = [
            node("user", "ask", None, token_ids=[5, 6], mask=[False, False]),
            node("assistant", "yes", 0, sampled=True, token_ids=[1, 7, 8], mask=[False, True, True], logprobs=[-1, -2]),
            node("user", "more", 1, token_ids=[9], mask=[False]),
            node("assistant", "no", 2, sampled=True, token_ids=[3], mask=[True], logprobs=[-0.25]),
        ]
        trace = {
            "agent": {"name": "solver", "trainable": True, "config": {}},
            "nodes": nodes,
            "rewards": {"a": {"score": reward, "weight": 0.5}, "b": {"score": 1.0}},
            "timing": {"start": 1.0},
        }
        return {
            "id": name,
            "task": {"type": "T", "data": {"id": "t7", "x": 1}},
            "group": {"id": "g"},
            "traces": [trace],
        }

    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line(*each)) + "\n" for each in [("a", 1.0), ("b", 0.0)]))
    found = imported(tmp_path / "traces.jsonl", tmp_path / "back", "verifiers")
    assert (found["rollouts"], found["groups"]) == (2, 1)
    assert found["lost"] == {"trace.rewards (several, added up)": 2, "trace.timing": 2}
    chosen = json.loads(shown(tmp_path / "back", "--best", "--json"))["chosen"]
    assert [one["reward"] for one in chosen["rollouts"]] == [1.5, 1.0]
    assert chosen["task"]["task_id"] == "t7"
    steps = chosen["rollouts"][0]["episode"]["trajectories"][0]["steps"]
    assert steps[0]["prompt_ids"] == [5, 6, 1]
    assert steps[1]["prompt_ids"] == {"continues": True, "new": [9]}
    assert [one["completion_ids"] for one in steps] == [[7, 8], [3]]
    assert [one["logprobs"] for one in steps] == [[-1.0, -2.0], [-0.25]]


def test_a_log_of_inspect_without_events_becomes_groups(tmp_path: Path) -> None:
    def sample(epoch: int, value: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "attachment://k"}, {"role": "assistant", "content": "yes"}]
        scores = {"match": {"value": value}, "length": {"value": 3}}
        return {
            "id": 7,
            "epoch": epoch,
            "messages": messages,
            "attachments": {"k": "long"},
            "scores": scores,
            "target": "yes",
            "total_time": 3.5,
        }

    log = {"version": 2, "status": "success", "eval": {"task": "t"}, "samples": [sample(1, "C"), sample(2, "I")]}
    (tmp_path / "log.json").write_text(json.dumps(log))
    found = imported(tmp_path / "log.json", tmp_path / "back", "inspect")
    assert (found["rollouts"], found["groups"]) == (2, 1)
    assert found["lost"] == {"sample.total_time": 2}
    text = shown(tmp_path / "back")
    assert "long" in text
    rollouts = json.loads(shown(tmp_path / "back", "--best", "--json"))["chosen"]["rollouts"]
    assert [(one["reward"], one["episode"]["is_correct"]) for one in rollouts] == [(1.0, True), (0.0, False)]


@pytest.mark.parametrize(
    ("name", "lines", "complaint"),
    [
        ("sft", ['{"messages": []}', "{"], "line 2 is not JSON"),
        ("sft", ["[1]"], "it must be a JSON object"),
        ("openai", ['{"messages": [{"content": "x"}]}'], r"messages\[0\] is not a message with a role"),
        ("openai", ['{"messages": "x"}'], "messages is text that is not JSON"),
        ("hf", ['{"prompt": [], "completion": []}'], "no assistant message"),
        ("sft", ['{"messages": [{"role": "assistant"}], "input_ids": [1]}'], "assistant_masks must have a 0 or a 1"),
        ("atif", ['{"steps": []}'], "is not an ATIF trajectory"),
        (
            "atif",
            ['{"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": [{}]}'],
            "not a valid ATIF trajectory",
        ),
        ("verifiers", ['{"prompt": []}'], "is not an episode of verifiers"),
        ("verifiers", ['{"task": {"data": {}}, "traces": [{"nodes": [{"parent": 0, "sampled": true}]}]}'], "ancestor"),
        ("hf", ['{"prompt": "a", "completion": "b", "step": "x"}'], "must be integers"),
        ("hf", ['{"prompt": "a", "completion": "b", "weight_version": -1}'], "cannot be imported"),
        ("sft", [""], "has no rows"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_written(
    tmp_path: Path, name: str, lines: list[str], complaint: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=complaint) as caught:
        imported(tmp_path / "rows.jsonl", tmp_path / "back", name)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_log_of_inspect_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('{"eval": {}}')
    with pytest.raises(ConfigError, match="is not an Inspect log"):
        imported(tmp_path / "log.json", tmp_path / "back", "inspect")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run, out = several(tmp_path / "run"), tmp_path / "rows.jsonl"
    exported(run, out, "sft")
    with pytest.raises(ConfigError, match="exists; choose another name"):
        exported(run, out, "sft")
    with pytest.raises(ConfigError, match="not an empty folder"):
        imported(out, run, "sft")
    (tmp_path / "empty").mkdir()
    imported(out, tmp_path / "empty", "sft")


def test_an_export_that_fails_in_its_second_file_leaves_no_folder(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    *lines, validation, last = (run / "groups.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "groups.jsonl").write_text("".join([*lines, validation.replace("{", "[", 1), last]), encoding="utf-8")
    with pytest.raises(RunError, match="no readable group"):
        exported(run, tmp_path / "rows", "sft")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_read_only_file_system_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    run = several(tmp_path / "run")
    original = Path.open
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(
        Path, "open", lambda path, *how, **more: (refuse if "w" in how else original)(path, *how, **more)
    )
    with pytest.raises(RunError, match=r"rows.jsonl cannot be written: Read-only file system"):
        exported(run, tmp_path / "rows.jsonl", "sft")


@pytest.mark.parametrize(
    ("name", "out", "complaint"),
    [
        ("openai", "rows.parquet", "a file of format openai must end in .jsonl"),
        ("openai", "rows", "a file of format openai must end in .jsonl"),
        ("sft", "rows.csv", "must end in .jsonl or .parquet or no suffix, for a folder"),
        ("inspect", "log.eval", "must end in .json"),
        ("atif", "one.json", "a .json file holds one document, but there are 12"),
    ],
)
def test_a_file_that_the_format_does_not_have_is_refused(tmp_path: Path, name: str, out: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        exported(several(tmp_path / "run"), tmp_path / out, name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_without_rollouts_leaves_nothing(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    for out in ("rows.jsonl", "folder"):
        with pytest.raises(ConfigError, match="no recorded rollout is chosen by these filters"):
            exported(run, tmp_path / out, "sft", reward_above=2.0)
    empty = write_run(tmp_path / "other", [failed()])
    with pytest.raises(ConfigError, match="the chosen rollouts have none"):
        exported(empty, tmp_path / "rows.jsonl", "openai")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="is not a run folder"):
            exported(path, tmp_path / "rows.jsonl", "sft")
    with pytest.raises(ConfigError, match="does not exist"):
        imported(tmp_path / "missing.jsonl", tmp_path / "back", "sft")


def test_missing_lines_of_a_run_that_has_ended_are_damage(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    (run / "summary.json").write_text("{}")
    groups = run / "groups.jsonl"
    groups.write_bytes(groups.read_bytes()[:-40])
    with pytest.raises(RunError, match=r"groups.jsonl is damaged: it lacks 1 group of groups_index.jsonl"):
        exported(run, tmp_path / "rows.jsonl", "sft")
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_run_that_goes_on_or_was_killed_says_so(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    assert "the run was interrupted" in called(export, run, tmp_path / "a.jsonl", "--to", "sft").output
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = called(export, run, tmp_path / "b.jsonl", "--to", "sft").output
    assert "the run is going on: these are its rollouts so far" in output


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    groups = run / "groups.jsonl"
    groups.write_bytes(groups.read_bytes()[:-40])
    assert exported(run, tmp_path / "rows.jsonl", "sft")["groups"] == 3


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    groups = run / "groups.jsonl"
    groups.write_bytes(b"x" + groups.read_bytes()[1:])
    with pytest.raises(RunError, match=r"groups\.jsonl has no readable group at byte 0"):
        exported(run, tmp_path / "rows.jsonl", "sft")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **others: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *more, **others)

    run = several(tmp_path / "run")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'rllm-viewer\[parquet\]'"):
        exported(run, tmp_path / "rows.parquet", "sft")


def test_contents_that_no_column_fits_are_refused_in_one_line(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "ask"}]}]
    run = write_run(
        tmp_path / "run",
        [group([rollout(0, [step(ASKED, "a")], 1.0), rollout(1, [step(parts, "b", prompt_ids=[1])], 0.0)])],
    )
    with pytest.raises(ConfigError, match="do not fit into the columns of a Parquet file") as caught:
        exported(run, tmp_path / "rows.parquet", "hf")
    assert "\n" not in str(caught.value)
    exported(run, tmp_path / "sft.parquet", "sft")


def test_rows_with_images_have_no_tokens(tmp_path: Path) -> None:
    image = {"type": "image", "path": "/tmp/a.png"}
    media = (PlacedMedia(sha256="0" * 64, kind="image", length_tokens=1, start=0),)
    asked = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
    one = step(asked, "a cat", prompt_ids=[9, 5], prompt_media=media)
    run = write_run(tmp_path / "run", [group([rollout(0, [one], 1.0)])])
    found = exported(run, tmp_path / "rows.jsonl", "sft")
    assert found["lost"]["step.prompt_ids (of conversations with images)"] == 1
    [row] = rows_of(tmp_path / "rows.jsonl")
    assert "input_ids" not in row
    with pytest.raises(ConfigError, match="the chosen rollouts have none"):
        exported(run, tmp_path / "openai.jsonl", "openai")
    for name in ("atif", "verifiers"):
        assert exported(run, tmp_path / f"{name}.jsonl", name)["lost"] == {}
        imported(tmp_path / f"{name}.jsonl", tmp_path / name, name)
        assert "what?" in shown(tmp_path / name)


@pytest.mark.parametrize("name", FORMATS)
def test_the_page_opens_what_was_imported(tmp_path: Path, name: str) -> None:
    """With rewards where the format has them, and without token ids where it has none."""
    out = tmp_path / f"out{FORMATS[name].suffixes[0]}"
    exported(several(tmp_path / "run"), out, name)
    found = imported(out, tmp_path / "back", name)
    index = RunIndex(tmp_path / "back", None)
    index.update()
    rows = index.rows()
    assert len(rows) == found["groups"]
    rewards = sorted(one.reward for row in rows for one in row.rollouts or () if one.reward is not None)
    assert rewards == ([] if name == "openai" else sorted([0.2, 0.5, 1.0] * 4))


def test_the_command_names_every_format() -> None:
    assert set(NAMES) == set(FORMATS)
