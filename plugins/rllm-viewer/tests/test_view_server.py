"""Tests the server of the viewer without a browser: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import add_tokens, called, failed, group, rollout, sorting, step, with_tools, write_run

from rllm_core.errors import ConfigError
from rllm_core.run_folder.groups import RecordedGroup
from rllm_core.run_folder.recorded import group_at, index_of
from rllm_core.types import Episode
from rllm_viewer.commands.view import view
from rllm_viewer.view.server import ViewServer, opened

METRICS = [{"step": step, "reward_mean": step / 10, "solved": 0.5} for step in range(1, 6)]
WAIT_SECONDS = 60


@contextmanager
def served(*runs: Path) -> Iterator[ViewServer]:
    server = opened(runs, 0, None)
    for run in server.answers.runs:
        run.index.update()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT_SECONDS)


def asked(
    server: ViewServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT_SECONDS)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def got(server: ViewServer, path: str) -> Any:
    status, _, body = asked(server, path)
    assert status == 200, body
    return json.loads(body)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "run", [sorting(step=1), with_tools(step=2), failed(step=2)], metrics=METRICS)
    add_tokens(path, {97: "a", 98: "b", 115: "<|im_end|>"})
    lines = [{"rollout": "r0", "seconds": 1.5, "calls": [{"kind": "model", "start": 0.1, "seconds": 1.0}]}]
    (path / "group_timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ids(server: ViewServer) -> list[int]:
    return [row["id"] for row in got(server, "/api/run/0/groups")["rows"]]


# --------------------------------------------------------------------------------------------------------------------
# Answers


def test_the_runs_and_their_groups(run: Path) -> None:
    with served(run) as server:
        [summary] = got(server, "/api/runs")
        assert (summary["name"], summary["status"], summary["steps"]) == ("run", "interrupted", 5)
        about = got(server, "/api/run/0")
        assert about["settings"]["workflow"] == "sort"
        assert about["problems"] == []
        rows = got(server, "/api/run/0/groups")["rows"]
        assert [row["step"] for row in rows] == [1, 2, 2]
        assert [rollout["solved"] for rollout in rows[0]["rollouts"]] == [True, False]


def test_a_group_has_the_prompt_once_and_where_its_extremes_differ(run: Path) -> None:
    with served(run) as server:
        shown = got(server, f"/api/run/0/group/{ids(server)[0]}")
    assert [message["content"] for message in shown["openings"][0]["messages"]] == ["You sort.", "sort: dbca"]
    assert shown["extremes"] == [0, 1]
    assert shown["differs"] == [0, 0, 2]
    first = shown["rollouts"][0]
    assert first["trajectories"][0]["steps"][0]["messages"] == []
    assert first["trajectories"][0]["steps"][0]["response"]["content"] == "abcd"
    assert first["trajectories"][0]["steps"][0]["advantage"] == [0.5, 0.5, 0.5]
    assert (first["reward"], first["parts"], first["seconds"]) == (1.0, {"share": 1.0}, 1.5)


def test_the_calls_of_an_episode_have_what_is_new(run: Path) -> None:
    with served(run) as server:
        shown = got(server, f"/api/run/0/group/{ids(server)[1]}")
    steps = shown["rollouts"][0]["trajectories"][0]["steps"]
    assert [[message["role"] for message in step["messages"]] for step in steps] == [[], ["tool"], ["tool"]]
    assert [step["break_reason"] for step in steps] == [None, "prefix_mismatch", None]
    assert [step["weight_version"] for step in steps] == [3, 4, 5]


def test_the_tokens_of_a_rollout(run: Path) -> None:
    with served(run) as server:
        tokens = got(server, f"/api/run/0/tokens/{ids(server)[0]}/1")
    [sequence] = tokens["sequences"]
    assert sequence["ids"] == [ord(one) for one in "sort: dbcaabdc"]
    [span] = sequence["spans"]
    assert (span["start"], span["stop"], span["version"], span["advantage"]) == (10, 14, 3, -0.5)
    assert len(span["logprob"]) == 4
    assert tokens["texts"] == {"97": "a", "98": "b", "115": "<|im_end|>"}
    assert tokens["control"] == [115]
    assert tokens["differs"] == {"sequence": 0, "position": 12, "other": 0}


def test_a_break_is_a_sequence_of_its_own(run: Path) -> None:
    with served(run) as server:
        tokens = got(server, f"/api/run/0/tokens/{ids(server)[1]}/0")
    assert [sequence["break_reason"] for sequence in tokens["sequences"]] == [None, "prefix_mismatch", None]


def test_an_episode_is_restored(run: Path) -> None:
    with served(run) as server:
        found = got(server, f"/api/run/0/episode/{ids(server)[0]}/0")
    assert Episode.model_validate(found) == group_at(run, index_of(run)[0]).rollouts[0].episode


def test_the_seconds_of_a_step(run: Path) -> None:
    (run / "timings.jsonl").write_text('{"step": 1, "step_seconds": 3.5}\n')
    with served(run) as server:
        timing = got(server, "/api/run/0/timing/1")
    assert timing["seconds"]["step_seconds"] == 3.5
    assert [each["seconds"] for each in timing["groups"][0]["rollouts"]] == [1.5, None]


def test_steps_continue_where_the_last_answer_ended(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("broken\n")
        file.write('{"step": 6, ')
    with served(run) as server:
        first = got(server, "/api/run/0/steps")["metrics"]
        assert [row["step"] for row in first["rows"]] == [1, 2, 3, 4, 5]
        assert first["broken"] == 1
        with (run / "metrics.jsonl").open("a") as file:
            file.write('"reward_mean": 0.5}\n')
        second = got(server, f"/api/run/0/steps?metrics={first['next']}")["metrics"]
        assert [row["step"] for row in second["rows"]] == [6]
        assert got(server, "/api/run/0/steps?metrics=999999")["metrics"]["is_new"]


def test_only_a_trained_group_has_waited(run: Path) -> None:
    with served(run) as server:
        numbers = [got(server, f"/api/run/0/group/{identity}")["group"] for identity in ids(server)]
        started = (f'{{"event":"dispatch","group":{number},"weight_version":2}}\n' for number in {*numbers} - {None})
        (run / "events.jsonl").write_text("".join(started))
        groups = [got(server, f"/api/run/0/group/{identity}") for identity in ids(server)]
    assert {shown["outcome"] for shown in groups} > {"trained"}
    for shown in groups:
        known = {"started": 2, "complete": None, "trained": None} if shown["outcome"] == "trained" else None
        assert shown["waited"] == known


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", metrics=METRICS[:2], training={"seed": 7})
    with served(run, other) as server:
        found = got(server, "/api/compare?runs=0,1")
    assert found["settings"]["training.seed"] == [0, 7]
    assert found["metrics"]["step"] == [5, 2]
    assert found["curve"] == "reward_mean"
    assert [len(curve) for curve in found["curves"]] == [5, 2]


def lines(server: ViewServer, query: str) -> list[dict[str, Any]]:
    status, _, body = asked(server, f"/api/run/0/search?{query}")
    assert status == 200
    return [json.loads(line) for line in body.splitlines()]


def test_search_says_how_far_it_is(run: Path) -> None:
    with served(run) as server:
        found = lines(server, "q=abdc")
        assert [(line["rollout"], line["where"]) for line in found if "id" in line] == [(1, "assistant")]
        assert found[-1]["done"]
        status, _, body = asked(server, "/api/run/0/search?q=(&regex=1")
        assert status == 400
        assert b"not a regular expression" in body


def test_a_search_of_a_run_without_groups_finds_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(write_run(tmp_path / "run", None)) as server:
        status, _, body = asked(server, "/api/run/0/search?q=x")
    assert (status, json.loads(body)) == (200, {"searched": 0, "done": True})
    assert capfd.readouterr().err == ""


def test_a_search_that_takes_forever_ends_with_its_reader(tmp_path: Path) -> None:
    asked_for = [{"role": "user", "content": "a" * 64 + "!"}]
    run = write_run(tmp_path / "run", [group([rollout(0, [step(asked_for, "b")], 1.0)])])
    with served(run) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT_SECONDS)
        connection.request("GET", "/api/run/0/search?regex=1&q=(a%2B)%2B%24")
        response = connection.getresponse()
        assert wait_for_searches(run, 1)
        response.close()
        connection.close()
        assert wait_for_searches(run, 0)


def wait_for_searches(run: Path, count: int) -> bool:
    """Waits until so many processes search a run."""
    for _ in range(WAIT_SECONDS * 10):
        commands = [content(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        if sum(str(run / "groups.jsonl").encode() in command for command in commands) == count:
            return True
        threading.Event().wait(0.1)
    return False


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# --------------------------------------------------------------------------------------------------------------------
# Damage


def test_the_page_names_all_its_modules(run: Path) -> None:
    with served(run) as server:
        _, _, page = asked(server, "/")
        names = set(re.findall(r'<link rel="modulepreload" href="(\w+\.js)">', page.decode()))
        assert "app.js" in names
        imported = set()
        for name in names:
            status, _, module = asked(server, f"/{name}")
            assert status == 200
            imported |= set(re.findall(r'from "\./(\w+\.js)"', module.decode()))
        assert imported <= names


def test_a_damaged_run_says_what_cannot_be_read(run: Path) -> None:
    (run / "run.toml").write_text("[broken")
    (run / "group_timings.jsonl").write_text("{}\n[\n")
    (run / "tokens.jsonl").write_text('{"id": "x"}\n')
    with served(run) as server:
        [summary] = got(server, "/api/runs")
        assert summary["status"] == "damaged"
        problems = got(server, "/api/run/0")["problems"]
        assert sum("run.toml cannot be read" in problem for problem in (summary["error"], *problems)) == 1
        [first, *_] = ids(server)
        assert got(server, f"/api/run/0/group/{first}")["rollouts"][0]["seconds"] is None
        assert got(server, f"/api/run/0/tokens/{first}/0")["texts"] == {}


def test_a_group_that_cannot_be_read_is_named(run: Path) -> None:
    with served(run) as server:
        [first, *_] = ids(server)
        content = (run / "groups.jsonl").read_bytes()
        (run / "groups.jsonl").write_bytes(b"#" * 20 + content[20:])
        status, _, body = asked(server, f"/api/run/0/group/{first}")
    assert status == 404
    assert "has no readable group at byte 0" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("recorded", "said"), [((), "has not recorded a group yet"), (None, "did not record them")], ids=["new", "old"]
)
def test_a_run_without_groups_says_why(tmp_path: Path, recorded: list[RecordedGroup] | None, said: str) -> None:
    run = write_run(tmp_path / "run", recorded)
    if recorded is None:
        text = (run / "run.toml").read_text()
        (run / "run.toml").write_text("\n".join(line for line in text.splitlines() if "groups_kept" not in line))
    with served(run) as server:
        assert said in got(server, "/api/run/0")["empty"]


def test_a_folder_that_is_deleted_is_named(run: Path) -> None:
    with served(run) as server:
        for file in run.iterdir():
            file.unlink()
        run.rmdir()
        [summary] = got(server, "/api/runs")
        assert summary["status"] == "damaged"
        problems = got(server, "/api/run/0")["problems"]
        assert sum("is not a run folder" in problem for problem in (summary["error"], *problems)) == 1


# --------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get_is_answered(run: Path, method: str) -> None:
    with served(run) as server:
        status, headers, _ = asked(server, "/api/runs", method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_other_names_of_this_machine_are_refused(run: Path, host: str) -> None:
    with served(run) as server:
        status, _, body = asked(server, "/api/runs", Host=host)
        assert status == 403
        assert b"run" not in body
        for good in ("localhost", "localhost:1", f"127.0.0.1:{server.server_port}", "[::1]:8"):
            assert asked(server, "/api/runs", Host=good)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/api/run/0/../../run.toml", "/run.toml",
        "/api/run/1", "/api/run/-1", "/api/run/0/group/7", "/api/run/0/tokens/0/9", "/api/run/0/episode/0/9",
        "/api/run/0/group/99999999999999999999999", "/api/run/%D9%A3", "/api", "/page/app.js", "/api/run/9/search?q=x",
        "/api/compare?runs=7",
    ],
)  # fmt: skip
def test_nothing_else_is_there(run: Path, path: str) -> None:
    with served(run) as server:
        status, headers, body = asked(server, path)
    assert status == 404
    assert headers["Content-Type"].startswith("application/json")
    assert b"root:" not in body


def test_the_headers_allow_nothing_from_elsewhere(run: Path) -> None:
    with served(run) as server:
        for path in ("/", "/api/runs", "/nothing"):
            _, headers, _ = asked(server, path)
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert "trusted-types 'none'" in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in headers
        assert server.server_address[0] == "127.0.0.1"


# --------------------------------------------------------------------------------------------------------------------
# The command


def test_the_command_names_what_is_no_run(tmp_path: Path) -> None:
    for folder, said in ((tmp_path, "is not a run folder, and contains none"), (tmp_path / "x", "there is no folder")):
        error = called(view, folder).exception
        assert isinstance(error, ConfigError)
        assert said in str(error)


def test_a_port_that_is_taken_is_named(run: Path) -> None:
    with served(run) as server:
        error = called(view, run, "--port", server.server_port).exception
    assert isinstance(error, ConfigError)
    assert f"port {server.server_port} cannot be used" in str(error)


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(run: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from rllm_core.cli import main; main()", "view", str(run.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RLLM_CACHE_DIR": str(tmp_path / "cache")},
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C stops the server\)", line)
        assert found, line
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=WAIT_SECONDS)
        connection.request("GET", "/api/runs")
        assert json.loads(connection.getresponse().read())[0]["name"] == "run"
        connection.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, errors) == (0, "")
