"""Tests the benchmark of the gateway: its referee, its figures, its measurements, and the agents that learn."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rllm_gateway import Gateway, history
from rllm_workflows.guess import GuessWorkflow

from benchmarks import gateway, gateway_trace, gateway_trial, learning
from benchmarks.agents import calculator, guess, rewards
from benchmarks.gateway_policy import ByteParser, Given, said
from benchmarks.gateway_referee import Receipt, Trained, judge
from benchmarks.peer_environments import ROOT
from rllm_core.engine import TITOCompleter
from rllm_core.tokens import TokenLog
from rllm_core.types import Task
from rllm_devkit.scripted import Script, ScriptedEngine

OWN = ("rllm", "benchmarks")


def given(rollout: int, asked: str, number: int) -> Given:
    """A completion of the engine."""
    text = [*f"[n{number}]".encode(), ByteParser.END]
    prompt = [ByteParser.START, *asked.encode()]
    return Given(rollout, ids(prompt), ids(text), np.full(len(text), -0.1 * number - 0.1, np.float32))


def ids(tokens: Any) -> Any:
    return np.array(tokens, np.int32)


def sample(*parts: Given) -> Trained:
    """A sample in which completions follow each other; the last one's prompt has all others."""
    last = parts[-1]
    spans = tuple((len(one.prompt), len(one.prompt) + len(one.completion)) for one in parts)
    tokens = np.concatenate([last.prompt, last.completion])
    return Trained(tokens, spans, np.concatenate([one.logprobs for one in parts]))


FIRST = given(0, "[task]", 0)
SECOND = given(0, "[task][n0]*[go]", 1)._replace(
    prompt=np.concatenate([FIRST.prompt, FIRST.completion, ids([91, 103, 93])])
)
OTHER = given(1, "[task]", 2)
ENGINE = [FIRST, SECOND, OTHER]
GOT = [
    Receipt(0, ("[task]",), "[n0]"),
    Receipt(0, ("[task]", "[n0]", "[g]"), "[n1] more"),
    Receipt(1, ("[task]",), "[n2]"),
]
LENGTHS = [len(one.completion) for one in ENGINE]


@pytest.mark.parametrize(
    ("receipts", "trained", "misattributed", "twice", "uncounted"),
    [
        pytest.param(GOT, {0: [sample(FIRST, SECOND)], 1: [sample(OTHER)]}, 0, 0, 0, id="right"),
        pytest.param(GOT, {0: [sample(FIRST), sample(SECOND)], 1: [sample(OTHER)]}, 0, 0, 0, id="two segments"),
        pytest.param(GOT, {0: [sample(FIRST, SECOND)], 1: []}, 0, 0, LENGTHS[2], id="lost"),
        pytest.param(
            GOT, {0: [sample(FIRST, SECOND), sample(FIRST)], 1: [sample(OTHER)]}, 0, LENGTHS[0], 0, id="twice"
        ),
        pytest.param(GOT, {0: [sample(FIRST, SECOND), sample(OTHER)], 1: []}, LENGTHS[2], 0, 0, id="of another"),
        pytest.param(GOT[:2], {0: [sample(FIRST, SECOND)], 1: [sample(OTHER)]}, LENGTHS[2], 0, 0, id="nobody got it"),
        pytest.param(
            [*GOT[:2], Receipt(0, ("[task]",), "[n2]")],
            {0: [sample(FIRST, SECOND)], 1: [sample(OTHER)]},
            LENGTHS[2],
            0,
            0,
            id="a client of another rollout got it",
        ),
        pytest.param(
            [GOT[0], GOT[1]._replace(asked=("[sub]", "[n0]", "[go]")), GOT[2]],
            {0: [sample(FIRST, SECOND)], 1: [sample(OTHER)]},
            LENGTHS[1],
            0,
            0,
            id="sampled for other messages",
        ),
        pytest.param(
            GOT,
            {0: [sample(FIRST), sample(given(0, "[other]", 1))], 1: [sample(OTHER)]},
            LENGTHS[1],
            0,
            LENGTHS[1],
            id="in another context",
        ),
        pytest.param(
            GOT,
            {0: [sample(FIRST, SECOND)], 1: [sample(OTHER._replace(logprobs=OTHER.logprobs - 1))]},
            LENGTHS[2],
            0,
            LENGTHS[2],
            id="with other log-probabilities",
        ),
    ],
)
def test_the_referee_counts(receipts: Any, trained: Any, misattributed: int, twice: int, uncounted: int) -> None:
    counted = judge(ENGINE, receipts, trained)
    assert {name: counted[name] for name in gateway.COUNTED} == {
        "misattributed_tokens": misattributed,
        "tokens_trained_twice": twice,
        "tokens_uncounted": uncounted,
    }


def counts(way: str) -> dict[str, int]:
    engine, receipts, trained = asyncio.run(gateway_trace.play(way, 24, seed=2))
    counted = judge(engine.given, receipts, trained)
    assert counted["calls"] > 200
    return {name: counted[name] for name in gateway.COUNTED}


@pytest.mark.slow
def test_the_gateway_gives_every_token_to_whom_it_belongs_and_position_does_not() -> None:
    assert counts("gateway") == dict.fromkeys(gateway.COUNTED, 0)
    assert all(counts("position").values())


@pytest.mark.slow
def test_the_referee_notices_a_gateway_that_matches_by_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_role(before: bytes, message: Mapping[str, Any]) -> bytes:
        return before + message["role"][:1].encode()

    monkeypatch.setattr(history, "chained", by_role)
    assert counts("gateway")["misattributed_tokens"] > 0


def test_times_are_medians_over_trials() -> None:
    rows = []
    for trial, slow in enumerate((1.0, 1.0, 4.0)):
        for side, seconds in (("native", 0.1), ("handler", 0.3), ("http", 0.8)):
            rows.append({"kind": "call", "side": side, "trial": trial, "calls": 1000, "cpu_seconds": slow * seconds})
        for side, turn, us in (("native", 5, 50), ("native", 200, 80), ("handler", 5, 150), ("handler", 200, 230)):
            rows.append({"kind": "length", "side": side, "trial": trial, "turn": turn, "cpu_us": slow * us})
        for side, seconds in (("native", 2.0), ("agent", 3.0)):
            steps = {"step_seconds": slow * seconds, "step_cpu_seconds": 2 * seconds}
            rows.append({"kind": "step", "side": side, "trial": trial, **steps})
    assert gateway.figures(rows) == {
        "cpu_ms_per_call": 0.3,
        "native_cpu_ms_per_call": 0.1,
        "cpu_over_native": 3.0,
        "http_cpu_ms_per_call": 0.8,
        "http_cpu_over_native": 8.0,
        "turn200_over_turn5": 1.5,
        "turn5_us": 100.0,
        "turn200_us": 150.0,
        "native_turn200_us": 80.0,
        "agent_step_over_native": 1.5,
        "native_step_seconds": 2.0,
        "agent_step_seconds": 3.0,
        "agent_step_over_native_cpu": 1.5,
        "native_step_cpu_seconds": 4.0,
        "agent_step_cpu_seconds": 6.0,
    }


def test_what_is_held_and_what_is_lost() -> None:
    memory = [{"kind": "memory", "branches": b, "array_bytes": 30 + b, "distinct_bytes": 20} for b in (False, True)]
    crowd = {"kind": "crowd", "calls": 100, "own_answers": 99, "right_steps": 98, "steps": 101, "simultaneous": 100}
    assert gateway.figures([*memory, {**crowd, "server_cpu_seconds": 0.05}]) == {
        "straight_bytes_over_distinct": 1.5,
        "bytes_over_distinct": 1.55,
        "lost_calls": 2,
        "surplus_steps": 3,
        "simultaneous_calls": 100,
        "crowd_server_cpu_ms_per_call": 0.5,
    }


def test_buffers_are_counted_once_whoever_looks_at_them() -> None:
    log = TokenLog(range(1000))
    own = np.zeros(10, np.float32)
    held = gateway_trial.array_bytes([{"a": log.view(0, 10), "b": [log.view(5, 900), log], "c": own, "d": own[2:]}], [])
    assert held == log.view(0, 1).base.nbytes + own.nbytes  # type: ignore[union-attr]
    assert gateway_trial.array_bytes([[own]], [own]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        {"part": "call", "rollouts": 8, "turns": 2, "characters": 20, "trials": 1},
        {"part": "length", "at": [5, 6], "characters": 20, "trials": 1},
        {"part": "memory", "rollouts": 1, "turns": 9, "characters": 20, "branches": True},
        {"part": "crowd", "rollouts": 3, "calls": 20, "seconds": 60},
    ],
    ids=lambda request: request["part"],
)
def test_parts_measure(request_: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for row in gateway.play(sys.executable, request_):
        assert row["kind"] == request_["part"]
        assert row.get("cpu_seconds", 1) > 0
        assert row.get("own_answers", 20) == row.get("right_steps", 20) == row.get("steps", 20) == 20
        assert row.get("simultaneous", 20) == 20
        # Branches that go on with equal tokens share them, which the distinct ones count twice.
        assert row.get("array_bytes", 2) >= 0.9 * row.get("distinct_bytes", 1) > 0


# --------------------------------------------------------------------------------------------------------------------
# Agents


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_agents_are_short_and_do_not_import_us(name: str) -> None:
    source = (ROOT / "benchmarks" / "agents" / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    about = ast.get_docstring(tree) or ""
    assert len([line for line in source.splitlines() if line.strip()]) - len(about.splitlines()) <= 20
    imported = [one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    imported += [name.name for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names]
    assert imported
    assert not any(one.startswith(OWN) for one in imported)


def played(agent: Any, engine: ScriptedEngine, **columns: Any) -> Any:
    async def playing() -> Any:
        opened = Gateway()
        await opened.open()
        try:
            async with opened.rollout(TITOCompleter(engine)) as address:
                return await agent(**columns, base_url=address.base_url)
        finally:
            await opened.close()

    return asyncio.run(playing())


@pytest.mark.parametrize(("secret", "outcome"), [(3, "found"), (4, "invalid")])
def test_the_agent_plays_the_game_of_the_workflow(secret: int, outcome: str) -> None:
    engine = ScriptedEngine(script=Script(good="3"), skill=1.0)
    assert played(guess.play, engine, secret=secret) == outcome
    native = asyncio.run(GuessWorkflow().run(Task(task_id="t", data={"secret": secret}), TITOCompleter(engine)))
    assert rewards.of_guess(native.trajectories[0], outcome) == native.trajectories[0].reward  # type: ignore[arg-type]


CALL = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}]}
WRONG = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 3, "b": 5}'}}]}
SHOWN, ERROR = {"content": "52"}, {"content": "error: the arguments are a and b"}


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([CALL, SHOWN, {"content": "52"}], 2.0),
        ([CALL, SHOWN, {"content": "51"}], 1.15),
        ([WRONG, SHOWN, {"content": "52"}], 1.0),
        ([WRONG, SHOWN, CALL, SHOWN, {"content": "52"}], 2.0),
        ([CALL, ERROR, {"content": "52"}], 0.0),
        ([CALL, SHOWN, {"content": "no"}], 0.0),
        ([{"content": "52"}], -1.0),
        ([{"content": "", "tool_calls": [*CALL["tool_calls"], *WRONG["tool_calls"]]}], -1.0),
        ([CALL, SHOWN] * 4, 1.0),
    ],
)
def test_the_reward_is_the_sum_of_those_of_the_workflow(turns: list[Any], reward: float) -> None:
    task = Task(task_id="t", data={"tool": "add", "a": 3, "b": 4})
    found = rewards.of_calculator(task, json.dumps([*turns, {"finish_reason": "stop"}]))
    assert found == pytest.approx(reward)
    if reward == 2.0:
        assert rewards.of_calculator(task, json.dumps([*turns, {"finish_reason": "length"}])) == 0.0


def test_the_agent_executes_calls() -> None:
    engine = gateway_trial.Prompt(0)
    engine._ids = np.array([*said("", None, ("mul", {"a": 3, "b": 4})), ByteParser.END], np.int32)
    *turns, end = played(calculator.play, engine, question="3 times 4")
    assert [turn["role"] for turn in turns] == ["assistant", "tool"] * 4
    assert end == {"finish_reason": "tool_calls"}
    assert len({turn["content"] for turn in turns[1::2]}) == 1
    assert 10 <= int(turns[1]["content"]) < 100


@pytest.mark.parametrize("game", learning.GAMES)
def test_agents_have_the_settings_and_tasks_of_the_workflow(game: str, tmp_path: Path) -> None:
    import tomllib

    native, preset, _ = learning.GAMES[game]
    written = tomllib.loads(learning.write_run_file(game, tmp_path).read_text(encoding="utf-8"))
    agent = written.pop("agent")
    assert written.pop("workflow") == "agent"
    assert written == {name: section for name, section in preset().items() if name != game}
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in Path(agent[f"{split}_file"]).read_text(encoding="utf-8").splitlines()]
        assert [row["id"] for row in rows] == [task.task_id for task in native().tasks(split)]  # type: ignore[arg-type]


def test_the_gap_is_that_of_the_worst_seed() -> None:
    rows = [
        {"kind": "agent", "game": "guess", "side": side, "seed": seed, "solved_after": solved, "cpu_seconds": 2.0}
        | {"segment_breaks": 0.0}
        for side, seed, solved in (("native", 1, 0.9), ("agent", 1, 0.95), ("native", 2, 0.99), ("agent", 2, 0.98))
    ]
    found = learning.figures([*rows, {**rows[0], "seed": 3}])
    assert (found["agent_guess_gap_max"], found["agent_guess_seeds"]) == (0.01, 2)
    assert found["agent_guess_solved_after_min"] == 0.95
