"""Tests the index of the viewer: its rows, how it grows and shrinks with a run, and how it survives damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from recorded_runs import failed, group, rollout, sorting, step, with_tools, write_run

from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.types import Trajectory
from rllm_viewer.view import facts
from rllm_viewer.view.files import Waited, Waits
from rllm_viewer.view.index import RunIndex
from rllm_viewer.view.search import Query, hits
from rllm_viewer.view.viewed_run import ViewedRun


def indexed(run: Path, cache: Path | None = None) -> RunIndex:
    index = RunIndex(run, cache)
    index.update()
    return index


def add(run: Path, one: RecordedGroup, *, entry: bool = True) -> None:
    line = one.to_json().encode()
    with (run / "groups.jsonl").open("ab") as file:
        offset = file.tell()
        file.write(line + b"\n")
    if entry:
        with (run / "groups_index.jsonl").open("a") as file:
            file.write(json.dumps(IndexedGroup.of(one, offset, len(line)).to_json()) + "\n")


def with_rewards_of_tokens() -> RecordedRollout:
    steps = [
        step([{"role": "user", "content": "x"}], "abc", token_rewards=np.array([0.5, 0.25, 1.0], np.float32)),
        step([{"role": "user", "content": "x"}], "abc", token_rewards=np.full(3, 0.5, np.float32), reward=2.0),
    ]
    one = rollout(
        4, [], None, trajectories=[Trajectory(steps=steps), Trajectory(role="judge", steps=steps, reward=1.0)]
    )
    numbers = [np.array([1, 2, 3], np.float32), np.full(3, 4, np.float32)]
    return RecordedRollout(one.episode, "trained", "trained", [numbers, [None, None]])


@pytest.mark.parametrize(
    "recorded", [sorting(), failed(), with_tools(5), group([with_rewards_of_tokens()])], ids=lambda one: one.reason
)
def test_rows_agree_with_the_groups(recorded: RecordedGroup, tmp_path: Path) -> None:
    [row] = indexed(write_run(tmp_path / "run", [recorded])).rows()
    assert row.rollouts is not None
    assert (row.id, row.step, row.task, row.kept) == (0, recorded.step, recorded.task.task_id, recorded.kept)
    assert (row.outcome, row.reason) == (recorded.outcome, recorded.reason)
    for found, expected in zip(row.rollouts, recorded.rollouts, strict=True):
        episode = expected.episode
        steps = [each for trajectory in episode.trajectories for each in trajectory.steps]
        assert found.reward == pytest.approx(expected.reward)
        assert found.tokens == sum(len(each.completion_ids) for each in steps)
        assert found.turns == len(steps)
        assert found.end == episode.termination_reason.value
        assert found.breaks == [each.break_reason for each in steps if each.break_reason]
        assert found.cut == any(each.finish_reason.value == "length" for each in steps)
        assert found.roles == list(dict.fromkeys(trajectory.role for trajectory in episode.trajectories))
        versions = [each.weight_version for each in steps]
        assert found.versions == ([min(versions), max(versions)] if versions else [])
        numbers = [n for of_steps in expected.advantages for array in of_steps if array is not None for n in array]
        assert found.advantage == (pytest.approx(np.mean(numbers)) if numbers else None)


def test_tools_and_breaks_are_named(tmp_path: Path) -> None:
    [row] = indexed(write_run(tmp_path / "run", [with_tools()])).rows()
    assert row.rollouts is not None
    assert (row.rollouts[0].tools, row.rollouts[0].breaks) == (["add"], ["prefix_mismatch"])


def test_it_follows_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1)])
    index = indexed(run)
    first = index.changes(0, 0)
    add(run, sorting(step=2))
    with (run / "groups.jsonl").open("ab") as file:
        file.write(b'{"step": 3')  # being written
    index.update()
    found = index.changes(first.epoch, first.next)
    assert [row.step for row in found.rows] == [2]
    assert found.size == found.read, "half a line is not waited for: the run may have been killed"
    assert [row.step for row in index.rows()] == [1, 2]


def test_it_gives_way_before_each_group(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1), sorting(step=2)])
    known: list[int] = []
    index = RunIndex(run, None)
    index.give_way = lambda: known.append(sum(row.rollouts is not None for row in index.rows()))
    index.update()
    assert known == [0, 1]


def test_groups_without_an_entry_are_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1)])
    add(run, sorting(step=2), entry=False)
    (run / "groups_index.jsonl").write_text("[broken\n" + (run / "groups_index.jsonl").read_text())
    assert [row.step for row in indexed(run).rows()] == [1, 2]


def test_a_broken_line_is_named_and_the_others_are_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1), sorting(step=2), sorting(step=3)])
    index = indexed(run)
    lines = (run / "groups.jsonl").read_bytes().split(b"\n")
    position = index.rows()[1].id
    lines[1] = b"#" * len(lines[1])
    (run / "groups.jsonl").write_bytes(b"\n".join(lines))
    damaged = indexed(run)
    assert damaged.changes(0, 0).broken == [position]
    assert [row.rollouts is None for row in damaged.rows()] == [False, True, False]


def test_a_run_that_was_cut_back_begins_anew(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1), sorting(step=2)])
    index = indexed(run)
    end = index.rows()[1].id
    for name, size in (("groups", end), ("groups_index", 0)):
        content = (run / f"{name}.jsonl").read_bytes()
        (run / f"{name}.jsonl").write_bytes(content[: size or content.index(b"\n") + 1])
    index.update()
    found = index.changes(0, 2)
    assert found.epoch == 1
    assert [row.step for row in found.rows] == [1]


def launched(run: Path) -> None:
    """Writes the file that a run replaces at each launch."""
    (run / "new.json").write_text("[{}]")
    (run / "new.json").replace(run / "plugins.json")


def test_a_run_that_was_cut_back_and_is_longer_again_begins_anew(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1), sorting(step=2)])
    launched(run)
    index = indexed(run, tmp_path / "cache")
    shutil.rmtree(run)
    write_run(run, [sorting(step=1), *(sorting(step=3, group=each) for each in range(4))])
    launched(run)
    index.update()
    assert index.epoch == 1
    assert [row.step for row in index.rows()] == [1, 3, 3, 3, 3]
    index.update()
    assert index.epoch == 1


def test_what_a_lost_launch_wrote_is_not_shown(tmp_path: Path) -> None:
    one = sorting(step=1)
    run = write_run(tmp_path / "run", [one])
    viewed = ViewedRun(run, None)
    shown = []
    for launch in (1, 2):  # the lines of the second are longer
        events = [f'{{"event":"dispatch","group":{one.group},"weight_version":{launch}}}'] * launch
        owners = [each.episode.rollout_id for each in one.rollouts]
        timings = [json.dumps({"rollout": owner, "seconds": launch, "more": [0] * launch}) for owner in owners]
        (run / "events.jsonl").write_text("".join(f"{line}\n" for line in events))
        (run / "group_timings.jsonl").write_text("".join(f"{line}\n" for line in timings))
        launched(run)
        viewed.update()
        shown.append(viewed.group(0))
    assert [each["waited"] for each in shown] == [Waited(1), Waited(2)]
    assert [[each["seconds"] for each in one["rollouts"]] for one in shown] == [[1, 1], [2, 2]]


def test_it_is_kept_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1), with_tools(step=2)])
    rows = indexed(run, tmp_path / "cache").rows()
    add(run, sorting(step=3))
    read: list[int] = []
    original = facts.of_line
    monkeypatch.setattr(facts, "of_line", lambda line, at: read.append(at) or original(line, at))
    again = indexed(run, tmp_path / "cache").rows()
    assert again[:2] == rows
    assert read == [again[2].id], "only the new line is read"
    assert not list(run.glob("*view*")), "the run folder is not changed"


def test_what_was_kept_of_another_file_is_not_used(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1)])
    indexed(run, tmp_path / "cache")
    for name in ("groups.jsonl", "groups_index.jsonl"):
        (run / name).unlink()
    add(run, sorting(step=2))
    assert [row.step for row in indexed(run, tmp_path / "cache").rows()] == [2]
    [kept] = (tmp_path / "cache").iterdir()
    kept.write_text("[]")
    assert [row.step for row in indexed(run, tmp_path / "cache").rows()] == [2]


def test_a_run_without_groups_has_no_rows(tmp_path: Path) -> None:
    assert indexed(write_run(tmp_path / "run", None)).rows() == []


def search(recorded: RecordedGroup, text: str, **options: bool) -> list[tuple[int, str, int]]:
    line = recorded.to_json().encode()
    return [(hit.rollout, hit.where, hit.places) for hit in hits(line, 0, Query(text, **options).pattern())]


def test_search_finds_texts_of_prompts_answers_and_tools() -> None:
    assert search(sorting(), "SORT: d") == [(0, "task", 2), (1, "task", 2)], "the second shares the prompt of the first"
    assert search(sorting(), "SORT: d", is_exact=True) == []
    assert search(sorting(), "abdc") == [(1, "assistant", 1)]
    assert search(sorting(), "ab[cd]{2}$", is_regex=True) == [(0, "task", 2), (1, "task", 2)]
    assert search(with_tools(), "result 1") == [(0, "tool", 1)]
    assert search(failed(), "took 60 s") == [(0, "error", 1)]
    assert search(sorting(), "prompt_ids") == [], "names of fields are no texts"
    with pytest.raises(ValueError, match="not a regular expression"):
        Query("(", is_regex=True).pattern()


def test_a_hit_has_the_text_around_it() -> None:
    asked = [{"role": "user", "content": "x" * 500 + "needle" + "y" * 500}]
    line = group([rollout(0, [step(asked, "a")], 1.0)]).to_json().encode()
    [hit] = hits(line, 7, Query("needle").pattern())
    assert msgspec.structs.asdict(hit) == {
        "id": 7, "rollout": 0, "where": "user", "before": "x" * 60, "found": "needle", "after": "y" * 60, "places": 1,
    }  # fmt: skip


def test_the_versions_during_which_a_group_waited(tmp_path: Path) -> None:
    lines = [
        '{"event":"sync","version":0}', '{"event":"dispatch","group":4,"weight_version":0}',
        '{"event":"sync","version":1}', '{"event":"enqueue","group":4,"weight_version":0}',
        '{"event":"enqueue","group":5}', '{"event":"dispatch"', '{"event":"consume","groups":[6,4],"weight_version":2}',
    ]  # fmt: skip
    waits = Waits(tmp_path)
    assert waits.of(4) is None, "there is no file"
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert waits.of(4) == Waited(0, 1, 2)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event":"consume","groups":[4],"weight_version":3}\n')
    assert waits.of(4) == Waited(0, 1, 3)
    assert [waits.of(group) for group in (5, 6, None)] == [None] * 3
    (tmp_path / "events.jsonl").write_text(f"{lines[1]}\n")
    assert waits.of(4) == Waited(0), "the run went back to a checkpoint"
