"""Tests runs with a judge that dies, stalls, floods, is busy or dear: complete books, and no invented reward."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import rllm_judge
from endpoint import Endpoint, serving
from judging import scoring
from recount import check_books
from rllm_judge import judges

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.costs import Tally, collecting
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.sandbox import Limits
from rllm_core.services import Services
from rllm_core.training.stopping import BudgetSpent
from rllm_core.types import Task
from rllm_viewer.verify import verify

pytestmark = pytest.mark.slow
GOOD = scoring(lambda answer, place: float(answer == "yes"))
GROUPS, ROLLOUTS = 4, 4
SMALL = ("training.steps=3", f"training.groups_per_step={GROUPS}", f"training.rollouts_per_group={ROLLOUTS}",
         "training.validation_rollouts=0", "algorithm.group_scorer=relative", "algorithm.group_scorer_attempts=2",
         "algorithm.max_group_attempts=2")  # fmt: skip
STATUS_LINE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Failing:
    """Deeds of an endpoint instead of an answer; `end` lets those that wait go on."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def dies(self, handler: BaseHTTPRequestHandler) -> None:
        """Closes the connection without a word."""
        handler.connection.close()

    def stalls(self, handler: BaseHTTPRequestHandler) -> None:
        """Begins an answer, and sends no more of it."""
        handler.wfile.write(STATUS_LINE + b"Content-Length: 1000\r\n\r\n{")
        handler.wfile.flush()
        self.over.wait()

    def floods(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers without end."""
        part = b"x" * (1 << 16)
        try:
            handler.wfile.write(STATUS_LINE + b"Transfer-Encoding: chunked\r\n\r\n")
            while not self.over.is_set():
                handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        except OSError:
            return  # the client has left

    def dies_in_the_middle(self, handler: BaseHTTPRequestHandler) -> None:
        """Closes the connection in the middle of an answer."""
        handler.wfile.write(STATUS_LINE + b"Content-Length: 1000\r\n\r\n{")
        handler.wfile.flush()
        handler.connection.close()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setattr(judges, "MAX_RETRIES", 1)  # each with a pause if the endpoint does not send one
    found = Failing()
    yield found
    found.over.set()


Trained = tuple[Path, dict[str, Any], BaseException | None]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """Trains the scripted policy with judge ``relative``; returns folder, summary and error."""

    def run(endpoint: Endpoint, *overrides: str, resume: bool = False) -> Trained:
        plugins = PluginManager.from_environment(no_plugins=True)
        plugins.register(rllm_devkit.scripted_plugin, "testing")
        plugins.register(rllm_judge, "judge")
        options = (
            f'algorithm.group_scorer_options={{model="big", base_url="{endpoint.url}", request_timeout_seconds=1}}'
        )
        config = load_run_config("say_yes", plugins, overrides=(*SMALL, options, *overrides), backend="scripted")
        error: BaseException | None = None
        try:
            asyncio.run(launch.train(assemble(config, plugins), tmp_path / "run", resume=resume, progress=Progress()))
        except Exception as raised:
            error = raised
        assert verify(tmp_path / "run").problems == []
        check_books(tmp_path / "run")
        return tmp_path / "run", json.loads((tmp_path / "run" / "summary.json").read_text()), error

    return run


def events(run: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == name]


def check_asked(costs: dict[str, Any], endpoint: Endpoint) -> None:
    """Every request is in the books; the end of a run may cancel one that is in the books before it arrives."""
    judge = costs["by_kind"]["judge"]
    assert judge["calls"] - judge.get("unmetered", 0) <= len(endpoint.asked) <= judge["calls"]


@pytest.mark.parametrize("how", ["dies", "stalls", "floods", "dies_in_the_middle", "busy"])
def test_a_judge_that_fails_trains_nothing_and_every_request_is_in_the_books(
    failing: Failing, train: Callable[..., Trained], how: str
) -> None:
    deed: Any = 429 if how == "busy" else getattr(failing, how)
    with serving(lambda messages: deed) as endpoint:
        run, summary, error = train(
            endpoint, "training.steps=1", "training.groups_per_step=1", "algorithm.group_scorer_timeout_seconds=8"
        )
        failing.over.set()
    assert isinstance(error, RunError)
    assert "unscored" in str(error)
    assert summary["books"]["trained"] == 0
    judge = summary["costs"]["by_kind"]["judge"]
    assert judge["calls"] == judge["unmetered"] == len(endpoint.asked) > 0
    assert summary["costs"]["by_kind"]["sampling"]["calls"] > 0
    rewards = [reward for event in events(run, "score") for reward in event["rewards"].values()]
    assert set(rewards) == {None}


def test_a_judge_that_fails_at_times_trains_only_what_it_scored(
    failing: Failing, train: Callable[..., Trained]
) -> None:
    deeds = itertools.cycle([None, 429, failing.dies, None, "nonsense", failing.dies_in_the_middle, None])
    with serving(lambda messages: next(deeds) or GOOD(messages)) as endpoint:
        run, summary, error = train(endpoint)
    assert error is None
    judge = summary["costs"]["by_kind"]["judge"]
    assert judge["calls"] == len(endpoint.asked)
    answered = judge["calls"] - judge["unmetered"]
    assert (judge["prompt_tokens"], judge["completion_tokens"]) == (11 * answered, 7 * answered)
    assert 0 < answered < judge["calls"]
    scores = {event["group"]: event for event in events(run, "score")}
    for event in events(run, "step"):
        for group in event["groups"]:
            assert None not in scores[group]["rewards"].values()


@pytest.mark.parametrize("mode", [(), ("training.staleness_threshold=2", "training.partial_rollout=true")])
def test_a_judge_that_costs_too_much_is_stopped_within_a_group(
    failing: Failing, train: Callable[..., Trained], mode: tuple[str, ...]
) -> None:
    usage = (5000, 2000)
    budget = 40_000  # five groups, of which a question costs 7000 tokens
    settings = (*mode, "training.steps=20", "training.checkpoint_every_steps=1")
    with serving(GOOD, usage) as endpoint:
        _, summary, error = train(endpoint, *settings, f"costs.budget.tokens={budget}")
        assert isinstance(error, BudgetSpent)
        costs = summary["costs"]
        assert (summary["status"], summary["stopped_by"]) == ("interrupted", "budget")
        check_asked(costs, endpoint)
        group = sum(usage) + 1000  # its question, and its rollouts
        assert budget - 2 * group < costs["tokens"] <= budget + group
        asked = len(endpoint.asked)
        _, summary, error = train(endpoint, *settings, f"costs.budget.tokens={budget}", resume=True)
        assert isinstance(error, BudgetSpent)
        assert len(endpoint.asked) == asked
        assert summary["costs"]["tokens"] == costs["tokens"]
        _, summary, error = train(endpoint, *settings, f"costs.budget.tokens={3 * budget}", resume=True)
        assert isinstance(error, BudgetSpent)
        assert summary["optimizer_steps"] >= 1
        check_asked(summary["costs"], endpoint)
        assert len(endpoint.asked) > asked


def test_a_judge_that_becomes_dear_is_stopped_within_a_group(failing: Failing, train: Callable[..., Trained]) -> None:
    with serving(GOOD, (10, 10)) as endpoint:

        def dearer(messages: list[dict[str, Any]]) -> str:
            if len(endpoint.asked) > 6:
                endpoint.usage = (50_000, 10)
            return GOOD(messages)

        endpoint.answer = dearer
        _, summary, error = train(endpoint, "costs.budget.tokens=60000", "training.steps=20")
    assert isinstance(error, BudgetSpent)
    check_asked(summary["costs"], endpoint)
    assert 50_000 < summary["costs"]["tokens"] <= 60_000 + 51_000


def test_the_reward_function_reports_what_its_judge_costs(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally()
    said = iter([429, "nonsense", '{"reason": "fine", "score": 0.75}'])
    with serving(lambda messages: next(said)) as endpoint:
        monkeypatch.setenv("RLLM_JUDGE_MODEL", "big")
        monkeypatch.setenv("RLLM_JUDGE_BASE_URL", endpoint.url)

        async def graded() -> float:
            plugins = PluginManager.from_environment(no_plugins=True)
            plugins.register(rllm_judge, "judge")
            services = Services(plugins)
            try:
                function = services.reward_function("judge", Limits(wall_seconds=60.0))
                with collecting(tally):
                    return float(await function(Task(task_id="task", data={}), "an answer"))
            finally:
                await services.close()

        assert asyncio.run(graded()) == 0.75
    assert tally.to_dict() == {"judge": {"calls": 3, "unmetered": 1, "prompt_tokens": 22, "completion_tokens": 14}}
