"""Agents as people ship them, unedited: their steps hold the tokens sampled, in one segment if they keep their history.

The policy reasons, calls two tools at once, and writes JSON with odd spacing and order, one token per byte.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playing import PLAYERS, check_exact, play

BOTH = """\
<think>
hm, use  add
</think>

Let me add.
<tool_call>
{"name": "add", "arguments": {"b":4 ,  "a": 3}}
</tool_call>
<tool_call>
{"arguments": {"a": 2,"b":   5}, "name": "mul"}
</tool_call>"""
ONE = '<tool_call>\n{"arguments": {"a": 9,"b":1}, "name": "sub"}\n</tool_call>'
DONE = "<think>\nso\n</think>\n\n They are 7, 10 and 8, é “ok” .\n"
CALCULATES = (BOTH, ONE, DONE)
TRANSFER = '<tool_call>\n{"name": "transfer_to_calculator", "arguments": {}}\n</tool_call>'
ASK_TWICE = "\n".join(
    f'<tool_call>\n{{"name": "calculate", "arguments": {{"input":"{question}" }}}}\n</tool_call>'
    for question in ("3+4", "2*5")
)
FINAL_CALL = '<tool_call>\n{"name": "final_answer", "arguments":  {"answer": "7, 10, 8: ok"}}\n</tool_call>'
CODE = "Thought: I add.\n<code>\nx = add(a=3,  b=4)\nprint(x)\n</code> and more after the stop text"
FINAL_CODE = 'Thought: done.\n<code>\nfinal_answer(f"{x}, ok")\n</code>'
ANSWER = "They are 7, 10 and 8, é “ok” ."


@dataclass
class Row:
    """An agent, and what must become of it.

    Attributes:
        agent: Its function in ``players``, or its command.
        script: What the policy says.
        answer: What the agent says in the end.
        segments: Number of token sequences to train on, each a conversation of its own.
        rewritten: How often it sends an answer back in other words.
        cut: How many answers end at a stop text.
        ignored: Fields of its requests that the run file decides.
        settings: Other settings of workflow ``agent``.
    """

    agent: str | tuple[str, ...]
    script: tuple[str, ...] = CALCULATES
    answer: str = ANSWER
    segments: int = 1
    rewritten: int = 0
    cut: int = 0
    ignored: set[str] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)


ROWS = [
    Row("loops:openai_sdk"),
    Row("loops:anthropic_sdk"),
    Row("loops:litellm"),
    Row("openai_agents:chat"),
    Row("openai_agents:chat_streamed"),
    Row("openai_agents:responses"),
    Row("openai_agents:responses_streamed"),
    Row("openai_agents:with_mcp"),
    Row("openai_agents:hands_over", (TRANSFER, BOTH, ONE, DONE), segments=2),
    Row("openai_agents:asks_another", (ASK_TWICE, "seven", "ten", DONE), segments=3),
    Row("pydantic_agents:chat", rewritten=2),
    Row("pydantic_agents:chat_streamed", (BOTH,), "Let me add."),  # its first text is its answer, whatever follows
    Row("pydantic_agents:responses", rewritten=2),
    Row("pydantic_agents:anthropic"),
    Row("graphs:whole"),
    Row("graphs:streamed"),
    Row("graphs:compacting", segments=3),
    Row(
        "smol:calls_tools",
        (BOTH, ONE, FINAL_CALL),
        "7, 10, 8: ok",
        segments=3,
        ignored={"tool_choice"},
        settings={"unsupported_fields": "ignore"},
    ),
    Row("smol:writes_code", (CODE, FINAL_CODE), "7, ok", segments=2, cut=2),
    Row((sys.executable, str(PLAYERS / "rewriting.py"), "{question}"), rewritten=2),
]


def named(row: Row) -> str:
    """Returns the name of a row."""
    return row.agent if isinstance(row.agent, str) else Path(row.agent[1]).stem


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of frameworks, for their agents
@pytest.mark.parametrize("row", ROWS, ids=named)
async def test_an_unedited_agent_is_exact(row: Row, tmp_path: Path) -> None:
    if isinstance(row.agent, str):
        file, name = row.agent.split(":")
        agent: dict[str, Any] = {"function": f"{PLAYERS / file}.py:{name}"}
    else:
        agent = {"command": row.agent}
    played = await play(tmp_path, row.script, **agent, **row.settings)
    assert played.answer == row.answer
    assert len(played.steps) == played.metric("calls") == len(row.script)
    assert check_exact(played.steps, played.engine, "</code>" if row.cut else None) == row.cut
    # An agent that rewrites its history begins a conversation with every call; no other sequence may break.
    assert played.segments == played.metric("roots") == row.segments
    assert played.metric("rewritten_answers") == row.rewritten
    assert played.ignored == row.ignored


async def test_mini_swe_agent_runs_unedited_as_a_program(tmp_path: Path) -> None:
    look = f"<think>\nlook\n</think>\n\nTHOUGHT: look\n{bash('echo  hi')}\n{bash('printf é“')}"
    script = (look, bash("false"), bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    mini = str(Path(sys.executable).with_name("mini"))
    options = "-t {question} -m openai/policy -y --exit-immediately -l 0 -o {folder}/played.json"
    played = await play(tmp_path, script, command=(mini, *options.split()), result_file="played.json")
    result = json.loads(played.answer)
    assert result["info"]["exit_status"] == "Submitted"
    outputs = [json.loads(message["content"]) for message in result["messages"] if message["role"] == "tool"]
    assert [(one["output"], one["returncode"]) for one in outputs[:3]] == [("hi\n", 0), ("é“", 0), ("", 1)]
    assert len(played.steps) == 3
    assert check_exact(played.steps, played.engine) == 0
    assert played.segments == played.metric("roots") == 1
    assert played.metric("rewritten_answers") == 0


def bash(command: str) -> str:
    """Returns a call of mini-swe-agent's only tool."""
    arguments = json.dumps({"command": command}, ensure_ascii=False, separators=(" , ", ":"))
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
