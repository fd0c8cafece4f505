"""Tests the tables of the page about memory against the bytes per parameter that the page names."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest
from pages import ROOT, Page

from rllm_core.config import RunConfig
from rllm_core.memory.transformer import TransformerShape

PAGE = Page(ROOT / "docs" / "memory.md")
BYTES = {"float32": 4, "bfloat16": 2}


def rows(heading: str, number: int) -> list[list[str]]:
    """Returns the cells of a table below a heading."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.section(heading), re.M)
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in tables[number].splitlines()[2:]]


def number(cell: str) -> float:
    return float(cell.split()[0])


def test_bytes_per_parameter_on_local() -> None:
    for trained, dtype, weights, optimizer, copy, total in rows("Backend `local`", 0):
        size = BYTES[dtype.strip("`")]
        assert int(weights) == (size if "adapters" in trained else BYTES["float32"])
        assert int(optimizer) == (0 if "adapters" in trained else 3 * BYTES["float32"])
        assert int(copy) == size
        assert int(total) == int(weights) + int(optimizer) + int(copy)


@pytest.mark.parametrize("row", rows("Backend `local`", 1), ids=lambda row: row[0])
def test_gigabytes_on_local(row: list[str]) -> None:
    totals = [int(cells[-1]) for cells in rows("Backend `local`", 0)]
    full, full_half, _, adapters = totals
    for cell, each in zip(row[1:], (full, full_half, adapters), strict=True):
        assert number(cell) == pytest.approx(number(row[0]) * each, rel=0.02)


@pytest.mark.parametrize("row", rows("Backend `verl`", 0), ids=lambda row: row[0])
def test_gigabytes_on_verl(row: list[str]) -> None:
    parameters = number(row[0])
    expected = [16 * parameters, 16 * parameters / 8, 2 * parameters, 2 * parameters / 4]
    assert [number(cell) for cell in row[1:]] == pytest.approx(expected)


def test_the_page_has_what_a_dry_run_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ROOT / "plugins" / "rllm-verl"
    monkeypatch.setattr(sys, "path", [*sys.path, str(plugin)])
    from rllm_verl.config import VerlConfig
    from rllm_verl.memory import estimate

    tables = tomllib.loads((plugin / "examples" / "1x8-7b-colocated.toml").read_text(encoding="utf-8"))
    verl = VerlConfig(**tables.pop("verl"))
    shape = TransformerShape.of(
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        }
    )
    assert shape is not None
    memory = estimate(RunConfig(**tables), verl, {"fsdp_config": {}}, shape, 80 * 10**9)
    [block] = [block for block in PAGE.blocks if block.language == "text"]
    assert block.text.splitlines() == list(memory.lines())[:4]
