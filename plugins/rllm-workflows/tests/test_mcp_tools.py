from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from rllm_workflows.calculator import Calculator
from rllm_workflows.mcp_tools import ROLLOUT_SEED, McpServer, McpTools, ToolResult, ToolServerError

from rllm_core.errors import ConfigError

PLAIN = str(Path(__file__).with_name("plain_mcp_server.py"))


def plain(*tools, ignore_end=False, **settings):
    extra = ["ignore_end"] if ignore_end else []
    return McpServer(command=(sys.executable, PLAIN, *(f"tool={tool}" for tool in tools), *extra), **settings)


def example(kind):
    return McpServer(command=(sys.executable, "-m", "rllm_workflows.mcp_example_server", kind))


def with_tools(servers, play):
    """Returns the result of ``await play(tools)`` with running servers."""

    async def run():
        async with McpTools(servers) as tools:
            return await play(tools)

    return asyncio.run(run())


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid, seconds=60.0):
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


async def pid_of(tools, name="pid"):
    return int((await tools.call(name, {})).text)


@pytest.mark.slow
def test_two_servers_with_the_sdk_answer_as_the_built_in_calculator_does():
    async def play(tools):
        names = [spec["function"]["name"] for spec in tools.specs]
        assert names == ["add", "sub", "sums__about", "mul", "products__about"]
        assert set(tools.specs[0]["function"]["parameters"]["properties"]) == {"a", "b"}, "the seed is not shown"
        for name in ("add", "sub", "mul"):
            for seed in (0, 7, 2**62):
                wanted = Calculator(seed).call(name, {"a": 3, "b": 5})
                assert await tools.call(name, {"a": 3, "b": 5}, meta={ROLLOUT_SEED: seed}) == ToolResult(wanted)
        for wrong in ({}, {"a": 1}, {"a": "x", "b": 1}, {"a": 10**10, "b": 1}):
            assert (await tools.call("mul", wrong, meta={ROLLOUT_SEED: 1})).is_error
        with pytest.raises(ToolServerError, match=r"'products' failed in 'mul'.*rollout-seed"):
            await tools.call("mul", {"a": 1, "b": 2})
        numbers = [tools.call("add", {"a": i, "b": 0}, meta={ROLLOUT_SEED: 0}) for i in range(128)]
        answered = [result.text for result in await asyncio.gather(*numbers)]
        assert answered == [Calculator(0).call("add", {"a": i, "b": 0}) for i in range(128)]

    with_tools({"sums": example("sums"), "products": example("products")}, play)


@pytest.mark.slow
def test_a_name_that_several_servers_have_is_qualified_in_all_of_them_whatever_their_order():
    def names(servers):
        async def play(tools):
            for spec in tools.specs:
                assert spec["type"] == "function"
            return sorted(spec["function"]["name"] for spec in tools.specs)

        return with_tools(servers, play)

    one, two = plain("pid", "meta", "place"), plain("pid", "half.way/there")
    assert names({"one": one, "two": two}) == ["half_way_there", "meta", "one__pid", "place", "two__pid"]
    assert names({"two": two, "one": one}) == ["half_way_there", "meta", "one__pid", "place", "two__pid"]
    assert names({"one": one}) == ["meta", "pid", "place"], "of two pages"


@pytest.mark.slow
def test_a_qualified_name_leads_to_its_server():
    async def play(tools):
        return await pid_of(tools, "one__pid"), await pid_of(tools, "two__pid"), await tools.call("pid", {})

    one, two, neither = with_tools({"one": plain("pid"), "two": plain("pid")}, play)
    assert one != two
    assert neither == ToolResult("error: no such tool", is_error=True)


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({"a": plain("b__x", "pid"), "b": plain("x"), "c": plain("x")}, "two tools are named 'b__x'"),
        ({"a": plain("x.y", "x/y")}, "two tools are named 'a__x_y'"),
        ({"a": plain("x" * 65)}, "has 65 characters"),
    ],
)
def test_names_that_cannot_be_told_apart_or_are_too_long(servers, message):
    with pytest.raises(ConfigError, match=message):
        with_tools(servers, None)


def test_what_a_model_is_shown():
    shown = {
        "picture": ToolResult("[image: image/png, not shown]\nshown"),
        "link": ToolResult("[resource_link, not shown]"),
        "structured": ToolResult('{"a": 1}'),
        "fails": ToolResult("it failed", is_error=True),
    }

    async def play(tools):
        for name, wanted in shown.items():
            assert await tools.call(name, {}) == wanted
        long = (await tools.call("long", {})).text
        assert long.startswith("xxx")
        assert len(long) < 21_000
        assert long.endswith("[cut: 100000 characters]")
        assert json.loads((await tools.call("meta", {}, meta={"x/y": 3})).text)["x/y"] == 3

    with_tools({"x": plain(*shown, "long", "meta")}, play)


@pytest.mark.parametrize(("tool", "message"), [("refuses", "not here"), ("nonsense", "validation error")])
def test_a_broken_protocol_is_no_answer(tool, message):
    async def play(tools):
        with pytest.raises(ToolServerError, match=message):
            await tools.call(tool, {})
        assert await pid_of(tools), "and the server keeps running"

    with_tools({"x": plain(tool, "pid")}, play)


def test_a_server_sees_little_of_the_environment_and_nothing_of_the_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_OF_TEST", "s3cret")
    monkeypatch.setenv("ANOTHER_SECRET", "also")

    async def play(tools):
        return json.loads((await tools.call("place", {})).text)

    folder, files, environment = with_tools({"x": plain("place")}, play)
    assert Path(folder) != tmp_path
    assert not files
    assert not Path(folder).exists(), "it went with the server"
    allowed = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    assert set(environment) - allowed <= {"LC_CTYPE", "PWD", "SHLVL", "_"}, "what interpreters add themselves"
    _, _, environment = with_tools({"x": plain("place", pass_environment=("SECRET_OF_TEST",))}, play)
    assert environment["SECRET_OF_TEST"] == "s3cret"
    assert "ANOTHER_SECRET" not in environment


def test_a_server_that_dies_fails_its_calls_and_is_started_anew(monkeypatch):
    monkeypatch.setenv("SECRET_OF_TEST", "s3cret")

    async def play(tools):
        first = await pid_of(tools)
        waiting = asyncio.create_task(tools.call("hang", {}))
        await asyncio.sleep(0.1)
        with pytest.raises(ToolServerError, match="'x' exited during 'die' and is being restarted") as died:
            await tools.call("die", {})
        assert "s3cret" not in str(died.value)
        with pytest.raises(ToolServerError, match="'x' exited during 'hang'"):
            await waiting
        wait_until_gone(first)
        assert await pid_of(tools) != first

    with_tools({"x": plain("pid", "die", "hang", pass_environment=("SECRET_OF_TEST",))}, play)


@pytest.mark.slow
def test_a_call_that_hangs_is_ended_and_costs_no_other_one(tmp_path):
    released = tmp_path / "released"

    async def play(tools):
        first = await pid_of(tools)
        hanging = asyncio.create_task(tools.call("hang", {}))
        await asyncio.sleep(6)  # the other call has this much longer
        slow = asyncio.create_task(tools.call("slow", {"until": str(released)}))
        with pytest.raises(ToolServerError, match=r"'x' did not answer 'hang' within 7 s"):
            await hanging
        assert is_running(first), "another call waits for it"
        assert await pid_of(tools) != first, "but it gets no further ones"
        released.touch()
        assert (await slow).text.split()[0] == str(first)
        await asyncio.to_thread(wait_until_gone, first)

    with_tools({"x": plain("pid", "hang", "slow", call_timeout_seconds=7.0)}, play)


@pytest.mark.slow
def test_calls_beyond_the_bound_wait():
    async def play(tools):
        slow = await asyncio.gather(*(tools.call("slow", {"seconds": 0.5}) for _ in range(9)))
        return max(int(result.text.split()[1]) for result in slow)

    assert with_tools({"x": plain("slow", max_concurrent_calls=3)}, play) == 3
    assert with_tools({"x": plain("slow", max_concurrent_calls=9)}, play) > 3


def test_a_call_that_is_cancelled_leaves_the_server_as_it_is():
    async def play(tools):
        first = await pid_of(tools)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await tools.call("hang", {})
        assert await pid_of(tools) == first

    with_tools({"x": plain("pid", "hang")}, play)


@pytest.mark.parametrize("ignore_end", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_server_outlives_its_run(ignore_end):
    pids = with_tools({"x": plain("pid", ignore_end=ignore_end), "y": plain("meta")}, pid_of)
    assert not is_running(pids)


def test_calls_that_wait_when_the_servers_are_stopped_have_no_answer_and_start_nothing():
    async def run():
        tools = McpTools({"x": plain("pid", "hang", max_concurrent_calls=2)})
        await tools.open()
        pid = await pid_of(tools)
        waiting = [asyncio.create_task(tools.call("hang", {})) for _ in range(3)]
        await asyncio.sleep(0.1)
        await tools.close()
        assert not is_running(pid)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ToolServerError}
        assert str(outcomes[2]) == "MCP server 'x' was stopped"

    asyncio.run(run())


@pytest.mark.slow
def test_no_server_outlives_a_run_that_is_killed():
    code = f"""
import asyncio, sys
from rllm_workflows.mcp_tools import McpServer, McpTools
async def main():
    async with McpTools({{"x": McpServer(command=(sys.executable, {PLAIN!r}))}}) as tools:
        print((await tools.call("pid", {{}})).text, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert is_running(pid)
        run.send_signal(signal.SIGKILL)
    wait_until_gone(pid)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("no-such-program-here",), "(no-such-program-here) did not start: .*No such file"),
        (("/bin/false", "--token=s3cret"), "(/bin/false) did not start: Connection closed"),
        (("/bin/cat",), "(/bin/cat) did not start"),
        (("/bin/sh", "-c", "echo what went wrong >&2"), "its stderr: what went wrong"),
        pytest.param(("/bin/sleep", "60"), r"did not start within 0\.5 s", marks=pytest.mark.slow),
    ],
)
def test_servers_that_do_not_start(command, message):
    seconds = 0.5 if command[0] in ("/bin/cat", "/bin/sleep") else 60.0  # the others end by themselves
    with pytest.raises(ConfigError) as failed:
        with_tools({"x": McpServer(command=command, start_timeout_seconds=seconds), "y": plain("pid")}, pid_of)
    assert failed.match(message.replace("(", r"\(").replace(")", r"\)"))
    assert "s3cret" not in str(failed.value)


def test_a_variable_that_is_not_set_is_named():
    with pytest.raises(ConfigError, match="'x' needs the environment variable NOT_SET_IN_ANY_TEST"):
        with_tools({"x": plain("pid", pass_environment=("NOT_SET_IN_ANY_TEST",))}, pid_of)


def test_without_the_sdk_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "rllm_workflows.mcp_server", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'rllm-workflows\[mcp\]'"):
        with_tools({"x": plain("pid")}, pid_of)


def test_calls_need_running_servers():
    with pytest.raises(RuntimeError, match="open"):
        asyncio.run(McpTools({"x": plain("pid")}).call("pid", {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"command": ()},
        {"command": ("",)},
        {"command": "python server.py"},
        {"command": ("./server",)},
        {"command": ("bin/server",)},
        {"command": ("x",), "pass_environment": ("A=1",)},
        {"command": ("x",), "call_timeout_seconds": 0},
        {"command": ("x",), "max_concurrent_calls": 0},
        {"command": ("x",), "shell": True},
    ],
)
def test_bad_sections(settings):
    with pytest.raises(ValidationError):
        McpServer(**settings)
