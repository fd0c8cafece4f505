"""Tests files of conversations: valid rows, and the errors for invalid ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from rllm_workflows.sft_rows import ConversationRow, open_rows

from rllm_core.errors import ConfigError

ASK = {"role": "user", "content": "ask"}
SAY = {"role": "assistant", "content": "say"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add"}}]}


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def plain(conversation: ConversationRow) -> list[dict[str, Any]]:
    return [dict(message) for message in conversation.messages]


def test_rows_are_read_again_when_they_are_wanted(tmp_path: Path) -> None:
    written = [[{**ASK, "content": f"é{number}" * number}, SAY] for number in range(1, 30)]
    rows = open_rows(lines(tmp_path, *({"messages": messages, "source": "ignored"} for messages in written)))
    assert len(rows) == 29
    for index in (28, 0, 13, 13):
        assert plain(rows[index]) == written[index]
    assert [plain(row) for row in rows[3:9:2]] == written[3:9:2]
    with pytest.raises(IndexError):
        rows[29]


def test_places_count_the_lines_of_the_file(tmp_path: Path) -> None:
    rows = open_rows(lines(tmp_path, "", {"messages": [ASK, SAY]}, "  ", {"messages": [ASK, CALL], "tools": [TOOL]}))
    assert [rows.where(index) for index in range(2)] == [f"{rows.path} line 2", f"{rows.path} line 4"]
    assert rows[1].tools == (TOOL,)
    assert rows[0].tools == ()


def test_recorded_tokens_are_read_from_both_kinds_of_files(tmp_path: Path) -> None:
    row = {"messages": [ASK, SAY], "input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}
    parquet.write_table(pyarrow.Table.from_pylist([row | {"messages": json.dumps([ASK, SAY])}]), tmp_path / "r.parquet")
    for path in (lines(tmp_path, row), tmp_path / "r.parquet"):
        [read] = open_rows(path)
        assert (read.token_ids, read.loss_mask) == ([5, 6, 7], [0, 1, 1])


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": [ASK, SAY], "input_ids": [1]}, "must be lists of the same length"),
        ({"messages": [ASK, SAY], "input_ids": [1, 2], "assistant_masks": [0]}, "must be lists of the same length"),
        ({"messages": [ASK, SAY], "input_ids": [1, -2], "assistant_masks": [0, 1]}, "input_ids must be token ids"),
        ({"messages": [ASK, SAY], "input_ids": [1, 2], "assistant_masks": [0, 2]}, "must have a 1 for each target"),
        ({"messages": [ASK, SAY], "input_ids": [1, 2], "assistant_masks": [1, 1]}, "such as the first token"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", 'must be an object {"messages"'),
        ({}, "has no messages"),
        ({"messages": []}, "has no messages"),
        ({"messages": "hello"}, "messages is a string, but not valid JSON"),
        ({"messages": {"role": "user"}}, "messages must be a list, not dict"),
        ({"messages": [ASK, "say"]}, r"messages\[1\] must be an object"),
        ({"messages": [{"content": "x"}, SAY]}, r"messages\[0\] has no role"),
        ({"messages": [ASK, {"role": "assistant"}]}, r"messages\[1\], with role 'assistant', has neither content nor"),
        ({"messages": [{"role": "user", "content": 3}, SAY]}, r"messages\[0\].content must be a string .* not int"),
        ({"messages": [ASK]}, "nothing to learn from"),
        ({"messages": [ASK, SAY], "tools": ["add"]}, "tools must be a list of objects"),
        ({"messages": [ASK, SAY], "weight": 0}, "weight = 0 must be a number above 0"),
        ({"messages": [ASK, SAY], "weight": True}, "weight = True must be"),
        ({"messages": [ASK, SAY], "weight": 10**400}, r"at most 1e\+30"),
        ({"messages": [ASK, SAY], "weight": 1e31}, r"at most 1e\+30"),
        ({"messages": "[" * 100_000}, "messages is a string, but not valid JSON"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}', "surrogate"),
    ],
)
def test_a_bad_row_is_one_line_that_names_its_place(tmp_path: Path, row: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        open_rows(lines(tmp_path, {"messages": [ASK, SAY]}, row))
    assert "rows.jsonl line 2" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("missing.jsonl", "does not exist"), ("rows.csv", "must end in .jsonl or .parquet"), ("empty.jsonl", "no rows")],
)
def test_files_that_are_no_data_set(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match=complaint):
        open_rows(tmp_path / name)


def test_parquet_rows_are_those_of_json(tmp_path: Path) -> None:
    written = [
        {"messages": [ASK, SAY], "weight": 0.5, "other": 1},
        {"messages": [ASK, {"role": "assistant", "tool_calls": CALL["tool_calls"]}, {"role": "tool", "content": "3"}]},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(written), path)
    rows = open_rows(path)
    same = open_rows(lines(tmp_path, *written))
    assert list(rows) == list(same)
    assert rows.where(1) == f"{path} row 2"

    texts = [{"messages": json.dumps(row["messages"]), "tools": json.dumps([TOOL])} for row in written]
    parquet.write_table(pyarrow.Table.from_pylist(texts), path)
    assert [plain(row) for row in open_rows(path)] == [plain(row) for row in same]
    assert open_rows(path)[0].tools == (TOOL,)

    parquet.write_table(pyarrow.Table.from_pylist([*written, {"messages": [ASK]}]), path)
    with pytest.raises(ConfigError, match=r"rows.parquet row 3: .*nothing to learn"):
        open_rows(path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        open_rows(path)


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'rllm-workflows\[parquet\]'"):
        open_rows(tmp_path / "rows.parquet")
