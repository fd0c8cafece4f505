"""Tests that the two sides of a comparison take turns: a child computes only while its gate is open."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sides


class FakeSide:
    """Stands in for a child process and records its calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def begin(self, request: dict[str, Any]) -> None:
        self._log.append(f"{self.name} begins {request['seed']}")

    def step(self) -> dict[str, Any]:
        self._log.append(self.name)
        return {"step": self._log.count(self.name)}


def test_sides_take_turns_and_swap_who_goes_first() -> None:
    log: list[str] = []
    ours, theirs = FakeSide("a", log), FakeSide("b", log)
    rows = list(sides.take_turns((ours, theirs), ({"seed": 1}, {"seed": 2}), 3))  # type: ignore[arg-type]
    assert log == ["a begins 1", "b begins 2", "a", "b", "b", "a", "a", "b"]
    assert [(side.name, row["step"]) for side, row in rows] == [
        ("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3),
    ]  # fmt: skip


class Requests(io.StringIO):
    """Requests of the parent; other work in the process may use CPU time while the child waits for one."""

    def __init__(self, lines: int, idle_cpu_seconds: float) -> None:
        super().__init__("{}\n" * lines)
        self._idle_cpu_seconds = idle_cpu_seconds

    def readline(self, *_: Any) -> str:
        end = time.process_time() + self._idle_cpu_seconds
        while time.process_time() < end:
            pass
        return super().readline()


def burn(cpu_seconds: float) -> None:
    end = time.process_time() + cpu_seconds
    while time.process_time() < end:
        pass


def test_the_clocks_stand_still_behind_a_closed_gate() -> None:
    answers = io.StringIO()
    gate = sides.Gate(Requests(2, idle_cpu_seconds=0.001), answers)
    gate.open_first()
    burn(0.1)
    gate.step_ended(1, sampled_tokens=5)
    ready, row = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"ready": {}}
    assert row["step"]["step"] == 1
    assert row["step"]["sampled_tokens"] == 5
    assert row["step"]["wall_seconds"] >= row["step"]["cpu_seconds"] * 0.9 >= 0.08


def test_a_side_that_computes_behind_a_closed_gate_is_caught() -> None:
    gate = sides.Gate(Requests(2, idle_cpu_seconds=0.05), io.StringIO())
    gate.open_first()
    burn(0.1)
    with pytest.raises(sides.SideError, match="while it should wait"):
        gate.step_ended(1)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], sides.Side]:
    """Starts a side whose module has the given source."""

    def start(source: str) -> sides.Side:
        (tmp_path / "some_side.py").write_text(source, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return sides.Side("some", "some_side")

    return start


def test_a_side_that_ends_early_is_an_error(child: Callable[[str], sides.Side]) -> None:
    with child("raise SystemExit(3)") as side, pytest.raises(sides.SideError, match="exit code 3"):
        side.begin({})


def test_a_child_answers_on_a_stream_that_prints_cannot_reach(child: Callable[[str], sides.Side]) -> None:
    source = """
from benchmarks.sides import serve

def train(request, gate):
    print("noise")
    gate.open_first()
    gate.step_ended(1, sampled_tokens=request["tokens"])
    return {"reward_mean": 0.5}

serve(train)
"""
    with child(source) as side:
        side.begin({"tokens": 7})
        assert side.step()["sampled_tokens"] == 7
        assert side.end() == {"reward_mean": 0.5}
