"""``rllm-core show``: which group is shown, and everything that is known about its rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_runs import train
from recorded_runs import add_tokens, called, failed, group, rollout, shown, sorting, step, with_tools, write_run

from rllm_core.errors import ConfigError, RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.groups import RecordedGroup
from rllm_core.run_folder.run import Run
from rllm_core.types import Episode, PlacedMedia, Task, Trajectory
from rllm_viewer.commands.show import show


def of(tmp_path: Path, *groups: RecordedGroup) -> Path:
    return write_run(tmp_path / "run", groups)


def with_reward(reward: float, **fields: Any) -> RecordedGroup:
    asked = [{"role": "user", "content": f"group {fields['group']}"}]
    return group([rollout(0, [step(asked, "answer")], reward)], **fields)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    return of(
        tmp_path,
        with_reward(0.1, step=1, group=3),
        with_reward(0.9, step=2, group=20, task=Task(task_id="easy")),
        with_reward(0.5, step=3, group=30, outcome="filtered", reason="uniform_rewards"),
        with_reward(0.4, step=3, group=31),
        failed(step=3, group=32),
    )


# --------------------------------------------------------------------------------------------------------------------
# Choosing


def test_the_overview_lists_groups_and_the_worst_of_the_last_step(several: Path) -> None:
    text = shown(several)
    for number in ("3", "20", "30", "31", "32"):
        assert any(line.split()[1:2] == [number] for line in text.splitlines()), text
    for reason in ("uniform_rewards", "timeout"):
        assert any(reason in line.split() for line in text.splitlines()), text
    assert "step 3, group 31" in text
    assert "rllm-core show" in text
    assert "--group 31" in text


def test_the_overview_of_a_long_run_has_the_last_groups(tmp_path: Path) -> None:
    text = shown(of(tmp_path, *(with_reward(0.5, step=at, group=at) for at in range(100))))
    assert "12 of 100 recorded groups" in text
    assert any(line.split()[:2] == ["99", "99"] for line in text.splitlines())
    assert not any(line.split()[:2] == ["87", "87"] for line in text.splitlines())


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (["--group", 20], 20),
        (["--worst"], 3),
        (["--best"], 20),
        (["--step", 3, "--best"], 30),
        (["--task", "easy"], 20),
        (["--reason", "uniform_rewards"], 30),
        (["--reason", "timeout"], 32),
        (["--rollout", 0], 31),
    ],
)
def test_options_choose_a_group(several: Path, options: list[Any], number: int) -> None:
    assert f"group {number}, task" in shown(several, *options).splitlines()[0]
    assert json.loads(shown(several, *options, "--json"))["chosen"]["group"] == number


def test_of_equal_groups_the_latest_is_shown(tmp_path: Path) -> None:
    run = of(tmp_path, *(with_reward(0.5, step=at, group=at) for at in (1, 2)))
    assert "step 2" in shown(run, "--worst")
    assert "step 2" in shown(run, "--best")


def test_a_validated_group_is_shown_only_without_another_of_the_step(tmp_path: Path) -> None:
    validated = with_reward(-1.0, step=2, group=None, outcome="validation", reason="validation", kept="validation")
    run = of(tmp_path, with_reward(0.5, step=2, group=5), validated)
    assert "step 2, group 5, task" in shown(run)
    assert "--task t" in shown(of(tmp_path / "other", validated, validated))


def test_several_matching_groups_are_listed(several: Path) -> None:
    found = json.loads(shown(several, "--step", 3, "--json"))
    assert [entry["group"] for entry in found["groups"]] == [30, 31, 32]
    assert found["chosen"] is None
    assert found["groups"][2]["reward_mean"] is None
    assert "step 2," not in shown(several, "--step", 3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--step", 7], "no recorded group has step 7; recorded: step 1, 2, 3"),
        (["--reason", "typo"], "recorded: reason trained, uniform_rewards, timeout"),
        (["--task", "x", "--step", 1], "task x"),
        (["--group", 20, "--rollout", 5], "no rollout 5; it has 0"),
    ],
)
def test_without_a_match_the_message_says_what_there_is(several: Path, options: list[Any], expected: str) -> None:
    error = called(show, several, *options).exception
    assert isinstance(error, ConfigError)
    assert expected in str(error)
    assert "\n" not in str(error)


# --------------------------------------------------------------------------------------------------------------------
# A group


def test_a_group_has_its_task_its_prompt_once_and_why_each_rollout_got_its_reward(tmp_path: Path) -> None:
    text = shown(of(tmp_path, sorting()))
    assert text.count("You sort.") == 1
    assert "answer     abcd" in text
    right, wrong = (line for line in text.splitlines() if line.startswith("rollout "))
    assert right.startswith("rollout 0: reward 1, solved, advantage 0.500")
    assert wrong.startswith("rollout 1: reward 0.250, not solved, advantage -0.500")
    assert "version 3" in wrong
    assert "share 0.500, expected abcd" in text
    assert text.index("share 1") < text.index("rollout 1") < text.index("share 0.500") < text.index("abdc")


def test_what_is_absent_is_not_0(tmp_path: Path) -> None:
    line = next(line for line in shown(of(tmp_path, failed())).splitlines() if line.startswith("rollout 0"))
    assert "reward none" in line
    assert "ended with timeout" in line
    assert "advantage" not in line
    assert "version" not in line
    assert "RolloutTimeout: took 60 s" in shown(tmp_path / "run")


def test_different_prompts_are_shown_with_their_rollouts(tmp_path: Path) -> None:
    asked = [[{"role": "user", "content": f"variant {index}"}] for index in range(2)]
    text = shown(of(tmp_path, group([rollout(at, [step(asked[at], "x")], 0.0) for at in range(2)])))
    assert "prompt of all rollouts" not in text
    assert text.index("rollout 0") < text.index("variant 0") < text.index("rollout 1") < text.index("variant 1")


def test_calls_results_breaks_and_versions(tmp_path: Path) -> None:
    lines = shown(of(tmp_path, with_tools())).splitlines()
    said = [" ".join(line.split()) for line in lines]
    assert 'call add({"turn": 0})' in said
    assert "tool result 1" in said
    assert any(line.startswith("break prefix_mismatch") for line in said)
    assert any("versions 3 to 5" in line and "1 break" in line for line in said)
    assert any("call 3" in line and "truncated after 1 token" in line for line in said)
    assert said.count("tool result 0") == 1, "each message is shown once"


def test_an_edited_conversation_is_said(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "one"}]
    later = [{"role": "user", "content": "summary of one"}, {"role": "user", "content": "two"}]
    text = shown(of(tmp_path, group([rollout(0, [step(first, "a"), step(later, "b")], 1.0)])))
    assert "edited" in text
    assert "summary of one" in text


def test_long_texts_and_conversations_are_cut_but_for_one_rollout(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "begin " + "word " * 2_000 + "end"}]
    run = of(tmp_path, group([rollout(0, [step(asked, "x")], 1.0)], group=1), with_tools(20, group=2))
    short, whole = shown(run, "--group", 1), shown(run, "--group", 1, "--rollout", 0)
    assert short.count("word") < 200
    assert "characters ..." in short
    assert short.count("end") >= 1
    assert whole.count("word") == 2_000
    assert "14 model calls left out" in shown(run, "--group", 2)
    assert "result 9" not in shown(run, "--group", 2)
    assert "result 9" in shown(run, "--group", 2, "--rollout", 0)


def test_several_roles_have_their_rewards_and_advantages(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "solve"}]
    steps = step(asked, "seven"), step([{"role": "user", "content": "judge"}], "good")
    trajectories = [
        Trajectory(role="solver", steps=[steps[0]], reward=1.0),
        Trajectory(role="judge", steps=[steps[1]], reward=0.5, trainable=False),
    ]
    one = rollout(0, [], None, trajectories=trajectories)
    one = replace(one, advantages=[[np.full(5, 0.75, np.float32)], [None]])
    text = shown(of(tmp_path, group([one])))
    assert "rollout 0: reward 1, advantage 0.750" in text
    assert "role solver: reward 1, advantage 0.750" in text
    assert "role judge: reward 0.500, not trainable" in text
    assert "prompt of all rollouts, role judge" in text


def test_media_parts_of_messages_and_token_rewards(tmp_path: Path) -> None:
    image = PlacedMedia(sha256="0" * 64, kind="image", length_tokens=3, start=1)
    content = [{"type": "image", "image": "x"}, {"type": "text", "text": "what is it?"}]
    asked = [{"role": "user", "content": content}]
    seen = step(
        asked, "", prompt_ids=[1, 9, 9, 9], prompt_media=(image,), completion_ids=[5, 6], logprobs=None, response={},
        token_rewards=np.array([0.5, 0.25], np.float32), control_tokens=2,
    )  # fmt: skip
    text = shown(of(tmp_path, group([rollout(0, [seen], None)])))
    assert "[image]" in text
    assert "what is it?" in text
    assert "does not have its content" in text
    assert "token rewards sum to 0.750" in text
    assert "2 control tokens" in text
    assert "2 tokens without text" in text
    add_tokens(tmp_path / "run", {5: "<call>\n", 6: "broken"})
    assert "sampled    <call>\n             broken" in shown(tmp_path / "run")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            {"calls": [{"kind": "model", "seconds": 0.5}, {"kind": "tool", "name": "add", "seconds": 0.25}]},
            "tool add 0.25 s",
        ),
        ({"seconds": 1.5, "calls": []}, "1.50 s in all"),
        ({}, None),
        ({"calls": [{"kind": "model"}, 5]}, None),
    ],
)
def test_seconds_are_shown_where_they_are_known(tmp_path: Path, line: dict[str, Any], expected: str | None) -> None:
    run = of(tmp_path, sorting())
    (run / "group_timings.jsonl").write_text(json.dumps({"rollout": "r0", **line}) + "\n", encoding="utf-8")
    text = shown(run)
    assert ("  time " in text) == (expected is not None)
    assert expected is None or expected in text


# --------------------------------------------------------------------------------------------------------------------
# JSON, and folders that have nothing to show


def test_json_restores_the_chosen_episodes(tmp_path: Path) -> None:
    recorded = sorting()
    run = of(tmp_path, recorded)
    add_tokens(run, {97: "a", 5: "unused"})
    found = json.loads(shown(run, "--tokens", "--json"))
    rows = found["chosen"]["rollouts"]
    assert [Episode.model_validate(row["episode"]) for row in rows] == [each.episode for each in recorded.rollouts]
    assert rows[1]["advantages"] == [[[-0.5] * 4]]
    assert rows[1]["reward_parts"] == {"share": 0.5, "expected": "abcd"}
    assert found["tokens"] == {"97": "a"}
    one = json.loads(shown(run, "--rollout", 1, "--json"))["chosen"]["rollouts"]
    assert [row["episode"]["rollout_id"] for row in one] == ["r1"]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    error = called(show, tmp_path).exception
    assert isinstance(error, ConfigError)
    assert "is not a run folder" in str(error)
    run = write_run(tmp_path / "mine")
    assert str(run) in str(called(show, tmp_path).exception), "of a folder of runs, it names one"


def test_a_run_without_recorded_groups_says_why(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old")
    text = (old / "run.toml").read_text(encoding="utf-8")
    (old / "run.toml").write_text(text.replace("groups_kept_per_step", "another_key"), encoding="utf-8")
    off = write_run(tmp_path / "off", training={"groups_kept_per_step": 0})
    new = write_run(tmp_path / "new", None)
    for run, why in ((old, "did not record"), (off, "groups_kept_per_step = 0"), (new, "not recorded a group yet")):
        error = called(show, run).exception
        assert isinstance(error, ConfigError)
        assert why in str(error)


def test_a_run_that_is_being_written_ends_in_half_a_line(tmp_path: Path) -> None:
    run = of(tmp_path, sorting())
    with (run / "groups_index.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"offset": 99')
    assert "rollout 1" in shown(run)


@pytest.mark.parametrize("name", ["groups.jsonl", "groups_index.jsonl"])
def test_damaged_files_are_one_line(tmp_path: Path, name: str) -> None:
    run = of(tmp_path, sorting())
    (run / name).write_text("[1]\n", encoding="utf-8")
    error = called(show, run).exception
    assert isinstance(error, RunError)
    assert name in str(error)


def test_the_first_group_may_not_have_its_entry_yet(tmp_path: Path) -> None:
    run = of(tmp_path, sorting())
    (run / "groups_index.jsonl").unlink()
    assert list(Run(run).groups()) == []


def test_groups_that_a_copy_of_an_active_run_lacks_are_left_out(tmp_path: Path) -> None:
    run = of(tmp_path, sorting(step=1), sorting(step=2))
    content = (run / "groups.jsonl").read_bytes()
    (run / "groups.jsonl").write_bytes(content[:-20])
    assert [one.step for one in Run(run).groups()] == [1]
    (run / "summary.json").write_text("{}")
    with pytest.raises(RunError, match="no readable group"):
        list(Run(run).groups())


@pytest.mark.parametrize("is_empty", [False, True])
def test_groups_without_their_index_are_damage(tmp_path: Path, is_empty: bool) -> None:
    run = of(tmp_path, sorting(), sorting())
    index = run / "groups_index.jsonl"
    index.unlink()
    if is_empty:
        index.touch()
    error = called(show, run).exception
    assert isinstance(error, RunError)
    assert f"{index} is damaged: it is missing or empty" in str(error)


def test_damaged_texts_of_tokens_are_one_line_and_only_needed_for_tokens(tmp_path: Path) -> None:
    run = of(tmp_path, sorting())
    (run / "tokens.jsonl").write_text("{}\n", encoding="utf-8")
    (run / "group_timings.jsonl").write_text("{}\n", encoding="utf-8")
    assert "rollout 1" in shown(run)
    assert isinstance(called(show, run, "--tokens").exception, RunError)


HOSTILE = "\x1b[2J\x1b]0;title\x07 \u202eevil\u202c \u200b 日本語のとても長い文章" * 20


@pytest.mark.parametrize(("columns", "charset"), [(40, "utf-8"), (80, "utf-8"), (80, "ascii")])
@pytest.mark.parametrize("options", [[], ["--rollout", 0], ["--tokens"]])
def test_hostile_text_is_escaped_and_fits(tmp_path: Path, columns: int, charset: str, options: list[Any]) -> None:
    """`called` measures every line."""
    asked = [{"role": HOSTILE, "content": HOSTILE, HOSTILE: HOSTILE}]
    call = {"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    answer = {"role": "assistant", "content": HOSTILE, "tool_calls": [call]}
    steps = [step(asked, "ab", prompt_ids=[1], response=answer, break_reason=HOSTILE, segment=1)]
    one = rollout(
        0, steps, 1.0, 0.5, metadata={"reward_parts": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE}, error=HOSTILE,
        metrics={HOSTILE: 1.0},
    )  # fmt: skip
    task = Task(task_id=HOSTILE.replace("\x1b", "x")[:100], data={HOSTILE: HOSTILE})
    hostile = group([one], kept=HOSTILE, outcome=HOSTILE, reason=HOSTILE, task=task)
    run = of(tmp_path, hostile, hostile)
    add_tokens(run, {97: HOSTILE, 1: HOSTILE})
    text = shown(run, *options, columns=columns, charset=charset)
    assert r"\x1b" in text
    assert r"\u202e" in text
    assert ("日本語" in text) == (charset == "utf-8") or options == ["--tokens"]


def test_colors_need_a_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in shown(of(tmp_path, sorting()), "--tokens")


@pytest.mark.slow
def test_the_groups_of_a_real_run(tmp_path: Path) -> None:
    """Its conversations, tool calls, times and tokens, with the advantages that were trained."""
    settings = ("steps=1", "groups_per_step=2", "rollouts_per_group=4", "validation_rollouts=1")
    options = [f"training.{setting}" for setting in settings]
    run = train(tmp_path / "run", PluginManager.from_environment(), "calculator", *options)
    overview = shown(run)
    assert "validation" in overview
    group_ = json.loads(shown(run, "--step", 1, "--reason", "trained", "--tokens", "--json"))
    rollouts = group_["chosen"]["rollouts"]
    assert len(rollouts) == 4
    text = shown(run, "--step", 1, "--reason", "trained")
    episodes = [Episode.model_validate(one["episode"]) for one in rollouts]
    calls = [step_ for one in episodes for trajectory in one.trajectories for step_ in trajectory.steps]
    for call in calls:
        assert call.text in text
    assert text.count("\n  call  ") == sum(len(call.response.get("tool_calls", ())) for call in calls) > 0
    assert text.count("\n  time  ") == 4
    assert text.count(" advantage ") > 4
    tokens = shown(run, "--step", 1, "--reason", "trained", "--tokens", "--rollout", 0)
    sampled = [id_ for t in episodes[0].trajectories for s in t.steps for id_ in s.completion_ids.tolist()]
    rows = [line.split() for line in tokens.splitlines() if line[:5].strip().isdigit() and len(line) > 60]
    assert [int(row[1]) for row in rows] == sampled
    assert "-" not in [cell for row in rows for cell in row], "each has a text, a log-probability and an advantage"
    assert {str(id_) for id_ in sampled} <= group_["tokens"].keys()
