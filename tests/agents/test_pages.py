"""Plays the examples of the pages about frameworks, unedited, as their tables of habits say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playing import play

PAGES = Path(__file__).parents[2] / "docs" / "agents"
BLOCK = re.compile(r"^```python\n(?:# ([\w-]+\.py)\n)?(.*?)^```$", re.M | re.S)
ADDS = '<tool_call>\n{"arguments": {"b":4 ,  "a": 3}, "name": "add"}\n</tool_call>'
DONE = "<think>\nso\n</think>\n\n They are 7 é ok .\n"
CODE = "Thought: I add.\n<code>\nx = add(a=3,  b=4)\nprint(x)\n</code> and more after the stop text"
FINAL_CODE = 'Thought: done.\n<code>\nfinal_answer(f"They are {x} é ok .")\n</code>'


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of frameworks, for their agents
@pytest.mark.parametrize(
    ("page", "script", "segments"),
    [
        ("openai-sdk", (ADDS, DONE), 1),
        ("anthropic-sdk", (ADDS, DONE), 1),
        ("openai-agents", (ADDS, DONE), 1),
        ("pydantic-ai", (ADDS, DONE), 1),
        ("langgraph", (ADDS, DONE), 1),
        ("litellm", (DONE,), 1),
        ("smolagents", (CODE, FINAL_CODE), 2),
        ("mcp", (ADDS, DONE), 1),
    ],
)
async def test_the_example_of_a_page_plays(
    page: str, script: tuple[str, ...], segments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in BLOCK.findall((PAGES / f"{page}.md").read_text(encoding="utf-8")):
        (tmp_path / (name or "page.py")).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    played = await play(tmp_path, script, function=f"{tmp_path / 'page.py'}:solve")
    assert played.answer == "They are 7 é ok ."
    assert len(played.steps) == len(script)
    assert played.segments == segments
