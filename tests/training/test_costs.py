"""Tests the books of what a run spends, and the budget that ends it. `recount` compares both with the journal."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recount import check_books

from rllm_core.assembly.parts import Parts
from rllm_core.costs import Tally, collecting, current, spend
from rllm_core.engine import EngineError
from rllm_core.errors import ConfigError
from rllm_core.run_folder.prediction import predict
from rllm_core.run_folder.progress import Progress
from rllm_core.sandbox import ChildFunction, ChildRaised
from rllm_core.training.stopping import BudgetSpent
from rllm_core.types import TokenOutput
from rllm_devkit.scripted import Script, ScriptedBackend
from rllm_viewer.verify import verify

RunScripted = Callable[..., Any]
ASYNCHRONOUS = ("training.staleness_threshold=2", "training.partial_rollout=true")
MODES = [
    ("scripted", ()),
    ("scripted", ASYNCHRONOUS),
    ("scripted_colocated", ("training.trigger_parameter_sync_step=2",)),
]


@dataclass
class Counted:
    """What an engine has answered, counted by itself."""

    tokens: Counter[str] = field(default_factory=Counter)

    def prepare(self, assembly: Parts) -> None:
        """Counts the tokens of every answer, in front of everything that keeps books."""
        backend: Any = assembly.backend
        opening = backend.init_rollout_engine

        async def counted(parser: Any) -> Any:
            engine = await opening(parser)
            sample = engine.get_token_outputs_from_token_input

            async def counting(prompt: Any, *, seeds: Sequence[int], **options: Any) -> list[TokenOutput]:
                outputs: list[TokenOutput] = await sample(prompt, seeds=seeds, **options)
                self.tokens["calls"] += len(outputs)
                self.tokens["prompt_tokens"] += len(prompt) * len(outputs)
                self.tokens["completion_tokens"] += sum(len(output.token_ids) for output in outputs)
                return outputs

            engine.get_token_outputs_from_token_input = counting
            return engine

        backend.init_rollout_engine = counted


def lines(run: Any) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run.path / "costs.jsonl").read_text().splitlines()]
    return [*found, *(json.loads(line) for path in run.path.glob("lost/*/costs.jsonl") for line in path.open())]


def dearest_group(run: Any, name: str) -> float:
    """Returns the most that a group of training has spent, from the lines of its rollouts and its score."""
    groups: Counter[str] = Counter()
    for line in lines(run):
        whose = line.get("rollout", "").split("-")[:3] or None
        where = "-".join(whose) if len(whose or ()) == 3 else line.get("scored", "").replace("train-", "train-0-")
        for amounts in line["costs"].values():
            groups[where] += amounts.get("calls", 0) if name == "calls" else 0
            if name == "tokens":
                groups[where] += amounts.get("prompt_tokens", 0) + amounts.get("completion_tokens", 0)
    return max(amount for where, amount in groups.items() if where.startswith("train-"))


# ----------------------------------------------------------------------------------------------------------------------
# Reporting


def test_what_is_spent_belongs_to_its_rollout_and_to_the_run() -> None:
    run = Tally()

    async def rollout(tokens: int) -> Tally:
        with collecting(Tally(current())) as tally:
            await asyncio.sleep(0)
            await asyncio.create_task(asyncio.to_thread(spend, "judge", prompt_tokens=tokens, completion_tokens=1))
            return tally

    async def both() -> list[Tally]:
        with collecting(run):
            return list(await asyncio.gather(rollout(10), rollout(20)))

    first, second = asyncio.run(both())
    assert first.to_dict() == {"judge": {"calls": 1, "prompt_tokens": 10, "completion_tokens": 1}}
    assert second.kinds["judge"].prompt_tokens == 20
    assert run.to_dict() == {"judge": {"calls": 2, "prompt_tokens": 30, "completion_tokens": 2}}


@pytest.mark.parametrize(
    ("amounts", "message"),
    [
        ({"calls": -1}, "calls = -1 must be a whole number from 0 on"),
        ({"completion_tokens": -1}, "completion_tokens = -1 must"),
        ({"unmetered": 2}, "unmetered = 2 must be at most calls = 1"),
        ({"calls": 1.5}, "calls = 1.5 must"),
        ({"calls": None}, "calls = None must"),
        ({"prompt_tokens": 10**400}, "prompt_tokens = 1000"),
        ({"seconds": -0.1}, "seconds = -0.1 must be a number from 0 on"),
        ({"seconds": float("nan")}, "seconds = nan must"),
        ({"seconds": float("inf")}, "seconds = inf must"),
        ({"kind": 3}, "the kind of cost must be text"),
    ],
)
def test_impossible_amounts_are_refused(amounts: dict[str, Any], message: str) -> None:
    """Some could not be added up or recorded, which would end the run without a summary."""
    with collecting(Tally()) as tally, pytest.raises(ValueError, match=message):
        spend(**{"kind": "search"} | amounts)
    assert not tally.kinds


def test_numbers_of_numpy_are_spent_as_plain_ones() -> None:
    with collecting(Tally()) as tally:
        spend("search", calls=np.int64(3), prompt_tokens=np.uint8(200), seconds=np.float32(0.5))  # type: ignore[arg-type]
        spend("search", prompt_tokens=np.uint8(200))  # type: ignore[arg-type]
    assert json.loads(json.dumps(tally.to_dict())) == {"search": {"calls": 4, "prompt_tokens": 400, "seconds": 0.5}}


@pytest.mark.slow
def test_what_a_child_process_spends_is_counted_also_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spending_child.py").write_text(
        "from rllm_core.costs import spend\n"
        "def spends(fails):\n"
        "    spend('judge', prompt_tokens=5, completion_tokens=2)\n"
        "    spend('judge', unmetered=1)\n"
        "    if fails:\n"
        "        raise ValueError('after it has spent')\n"
        "    return 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tally = Tally()

    async def calls() -> None:
        function = ChildFunction("spending_child:spends", children=1, variables=("PYTHONPATH",))
        with collecting(tally):
            assert await function(False) == 1.0
            with pytest.raises(ChildRaised, match="after it has spent"):
                await function(True)
        function.close()

    asyncio.run(calls())
    assert tally.to_dict() == {"judge": {"calls": 4, "unmetered": 2, "prompt_tokens": 10, "completion_tokens": 4}}


# ----------------------------------------------------------------------------------------------------------------------
# Books


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "mode"), MODES)
def test_the_books_have_what_the_engine_has_answered(
    run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch, backend: str, mode: tuple[str, ...]
) -> None:
    failures = Script(failure=lambda request: EngineError("lost") if request % 17 == 0 else None)
    monkeypatch.setattr(ScriptedBackend, "script", failures)
    counted = Counted()
    run = run_scripted(
        *mode,
        "say_yes.turns=3",
        "algorithm.filter_uniform_groups=true",
        "rollout.max_attempts=2",
        backend=backend,
        prepare=counted.prepare,
    )
    assert run.error is None
    books = run.summary["books"]
    assert run.summary["retries"] > 0
    assert books["filtered"] > 0
    sampling = run.summary["costs"]["by_kind"]["sampling"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert sampling[name] == counted.tokens[name]
    assert sampling["calls"] - sampling["unmetered"] == counted.tokens["calls"]


@pytest.mark.slow
def test_prices_make_money_of_tokens(run_scripted: RunScripted) -> None:
    run = run_scripted(
        "costs.prices.sampling={million_prompt_tokens=2.0, million_completion_tokens=8.0, thousand_calls=0.5}",
        "costs.prices.training={million_completion_tokens=100.0}",
    )
    costs = run.summary["costs"]
    sampling, training = costs["by_kind"]["sampling"], costs["by_kind"]["training"]
    expected = sampling["prompt_tokens"] * 2e-6 + sampling["completion_tokens"] * 8e-6 + sampling["calls"] * 5e-4
    assert sampling["money"] == pytest.approx(expected)
    assert training["money"] == pytest.approx(training["completion_tokens"] * 1e-4)
    assert costs["money"] == pytest.approx(sampling["money"] + training["money"])
    assert [row["spent_money"] for row in run.lines("timings")] == sorted(
        row["spent_money"] for row in run.lines("timings")
    )
    assert run.lines("timings")[-1]["spent_tokens"] <= costs["tokens"]


@pytest.mark.slow
def test_a_small_budget_is_not_rounded_to_nothing(run_scripted: RunScripted) -> None:
    prices = ("costs.prices.sampling.million_prompt_tokens=0.001", "costs.budget.money=0.000002")
    run = run_scripted(*prices, "training.validation_rollouts=0")
    assert re.search(r"the budget ended the run: 1\.\d+e-06 of 2e-06 are spent", str(run.error))


def test_without_prices_there_is_no_money(run_scripted: RunScripted) -> None:
    run = run_scripted()
    assert "money" not in run.summary["costs"]
    assert {row["spent_money"] for row in run.lines("timings")} == {None}


@pytest.mark.slow
def test_the_teacher_is_in_the_books(run_scripted: RunScripted) -> None:
    run = run_scripted(
        "algorithm.name=distill", "teacher.engine=scripted", "teacher.model=teacher", "algorithm.loss=reinforce"
    )
    assert run.error is None
    by_kind = run.summary["costs"]["by_kind"]
    trained = run.summary["books"]["trained"]
    assert by_kind["teacher"]["calls"] == trained
    assert by_kind["teacher"]["prompt_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_workflow_spends_is_counted_where_it_runs(
    run_scripted: RunScripted, tmp_path: Path, workers: int
) -> None:
    env = tmp_path / "env.py"
    env.write_text(
        "from rllm_core.costs import spend\n"
        "from rllm_core.scope import timed\n"
        "from rllm_core.types import Task\n"
        "from rllm_core.workflow import Workflow\n"
        "class Searching(Workflow):\n"
        "    def tasks(self, split):\n"
        "        return [Task(task_id=f'{split}-{n}', data={}) for n in range(20)]\n"
        "    async def run(self, task, completer):\n"
        "        spend('search', calls=2, seconds=0.25)\n"
        "        with timed('tool', 'look'):\n"
        "            step = await completer.complete([{'role': 'user', 'content': 'say yes'}])\n"
        "        return self.episode(task, [step], reward=float(step.text == 'yes'))\n"
    )
    where = (f"rollout.workers={workers}", "rollout.host=processes") if workers else ()
    run = run_scripted(*where, target=str(env))
    assert run.error is None
    rollouts = 6 * 4 * 4 + 2 * 10
    by_kind = run.summary["costs"]["by_kind"]
    assert by_kind["search"] == {"calls": 2 * rollouts, "seconds": pytest.approx(rollouts / 4)}
    assert by_kind["tools"]["calls"] == by_kind["sampling"]["calls"] == rollouts


def rollouts_started(run: Path) -> int:
    """Returns how many rollouts of all launches have started, those included that a resume has put aside."""
    files = [*run.glob("lost/*/events.jsonl"), run / "events.jsonl"]
    return sum(path.read_text().count('"event":"start"') for path in files)


@pytest.mark.slow
def test_what_was_lost_with_a_launch_was_paid_as_well(run_scripted: RunScripted) -> None:
    def fail_in_step_four(assembly: Parts) -> None:
        backend: Any = assembly.backend
        update = backend.update_policy

        async def failing(step: Any) -> Any:
            if step.step == 4:
                raise OSError("the device is gone")
            return await update(step)

        backend.update_policy = failing

    settings = ("training.checkpoint_every_steps=2", "training.validation_rollouts=0")
    whole = run_scripted(*settings)
    tokens = whole.summary["costs"]["tokens"]
    first = run_scripted(*settings, path=whole.path.with_name("lossy"), prepare=fail_in_step_four)
    assert first.error is not None
    again = run_scripted(*settings, path=first.path, resume=True)
    assert again.error is None
    # A checkpoint keeps the groups of step 3 that had ended by then; the others, and step 4, were generated twice.
    steps = rollouts_started(again.path) / (rollouts_started(whole.path) / 6)
    assert 7 <= steps <= 8
    assert again.summary["costs"]["tokens"] == pytest.approx(tokens * steps / 6, rel=0.05)
    assert again.summary["costs"]["tokens"] > first.summary["costs"]["tokens"]
    assert list(again.path.glob("lost/0/costs.jsonl"))


# ----------------------------------------------------------------------------------------------------------------------
# Budget


LIMITS = ("tokens", "calls", "money")


# What is counted and when it is compared have nothing to do with each other: each limit and each mode once.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "mode", "limit"),
    [
        pytest.param(*MODES[row], limit, marks=[] if row == column else [pytest.mark.by_hand])
        for row in range(len(MODES))
        for column, limit in enumerate(LIMITS)
    ],
)
def test_a_budget_ends_the_run_within_a_group_and_a_larger_one_goes_on(
    run_scripted: RunScripted, tmp_path: Path, backend: str, mode: tuple[str, ...], limit: str
) -> None:
    prices = ("costs.prices.sampling={million_prompt_tokens=1e6, million_completion_tokens=1e6}",)
    settings = (*mode, *prices, "training.checkpoint_every_steps=1", "algorithm.filter_uniform_groups=false")
    whole = run_scripted(*settings, backend=backend, path=tmp_path / "whole")
    assert whole.error is None
    budget = whole.summary["costs"][limit] * 0.6
    given = f"costs.budget.{limit}={budget if limit == 'money' else int(budget)}"
    run = run_scripted(*settings, given, backend=backend)
    assert isinstance(run.error, BudgetSpent)
    assert run.error.exit_code == 3
    assert f"costs.budget.{limit}" in str(run.error)
    summary = run.summary
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", "budget")
    assert 0 < summary["optimizer_steps"] < 6
    spent, group = summary["costs"][limit], dearest_group(run, "calls" if limit == "calls" else "tokens")
    assert budget - 2 * group < spent <= budget + group

    again = run_scripted(*settings, given, backend=backend, path=run.path, resume=True)
    assert isinstance(again.error, BudgetSpent)
    assert again.summary["optimizer_steps"] == summary["optimizer_steps"]
    assert again.summary["costs"][limit] == pytest.approx(spent)

    given = f"costs.budget.{limit}={budget * 4 if limit == 'money' else int(budget * 4)}"
    more = run_scripted(*settings, given, backend=backend, path=run.path, resume=True)
    assert more.error is None
    assert more.summary["costs"][limit] > spent
    assert more.summary["stopped_by"] is None
    assert verify(more.path).holds


@pytest.mark.slow
def test_the_limit_without_room_for_a_group_is_named_among_others(run_scripted: RunScripted, tmp_path: Path) -> None:
    whole = run_scripted("training.validation_rollouts=0", path=tmp_path / "whole")
    calls = whole.summary["costs"]["calls"] // 2 - 1
    run = run_scripted(
        "training.validation_rollouts=0", "costs.budget.tokens=100_000_000", f"costs.budget.calls={calls}"
    )
    assert isinstance(run.error, BudgetSpent)
    assert run.summary["costs"]["calls"] < calls, "not reached, so that only the next group decides"
    assert "too much to start another group" in str(run.error)
    assert "costs.budget.calls" in str(run.error)


@pytest.mark.slow
def test_a_budget_of_exactly_what_a_run_costs_lets_it_end(run_scripted: RunScripted, tmp_path: Path) -> None:
    """Its last group and its last validation reach the limit; what was paid for them is not thrown away."""
    settings = ("training.validation_rollouts=4", "algorithm.filter_uniform_groups=false")
    whole = run_scripted(*settings, path=tmp_path / "whole")
    run = run_scripted(*settings, f"costs.budget.calls={whole.summary['costs']['calls']}")
    assert run.error is None
    assert run.lines("metrics") == whole.lines("metrics")


@pytest.mark.slow
def test_a_budget_that_one_step_reaches_trains_this_step(run_scripted: RunScripted, tmp_path: Path) -> None:
    settings = ("training.validation_rollouts=0", "algorithm.filter_uniform_groups=false")
    one = run_scripted(*settings, "training.steps=1", path=tmp_path / "one")
    run = run_scripted(*settings, f"costs.budget.calls={one.summary['costs']['calls']}")
    assert isinstance(run.error, BudgetSpent)
    assert run.summary["optimizer_steps"] == 1
    assert verify(run.path).holds


@pytest.mark.slow
def test_a_budget_also_ends_a_validation(run_scripted: RunScripted) -> None:
    notes: list[str] = []

    class Notes(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    whole = run_scripted("training.validation_rollouts=40", "training.steps=1")
    of_one = whole.summary["costs"]["calls"] // (40 * 2 + 16)
    run = run_scripted(
        "training.validation_rollouts=40",
        f"costs.budget.calls={15 * of_one}",
        path=whole.path.with_name("budget"),
        progress=Notes(),
        is_begun=False,
    )
    assert isinstance(run.error, BudgetSpent)
    assert "the validation after step 0 did not end" in notes[0]
    assert run.summary["optimizer_steps"] == 0
    assert run.summary["costs"]["calls"] <= 15 * of_one
    assert check_books(run.path) is not None


@pytest.mark.slow
def test_a_scorer_that_costs_too_much_ends_the_run_within_a_group(run_scripted: RunScripted, tmp_path: Path) -> None:
    scorer = tmp_path / "dear.py"
    scorer.write_text(
        "import asyncio\n"
        "from rllm_core.algorithms.group_scorer import GroupScorer\n"
        "class Dear(GroupScorer):\n"
        "    groups = 0\n"
        "    async def score(self, group, services):\n"
        "        Dear.groups += 1\n"
        "        for _ in range(10):\n"
        "            for _ in range(50):\n"  # more rounds of the event loop than a run needs to stop
        "                await asyncio.sleep(0)\n"
        "            services.count(prompt_tokens=1000 if Dear.groups > 9 else 1, completion_tokens=100)\n"
        "        return {e.rollout_id: e.trajectories[0].total_reward for e in group.episodes}\n"
    )
    run = run_scripted(f"algorithm.group_scorer={scorer}", "costs.budget.tokens=20000", *ASYNCHRONOUS)
    assert isinstance(run.error, BudgetSpent)
    costs = run.summary["costs"]
    assert costs["by_kind"]["judge"]["prompt_tokens"] > 10_000
    assert costs["tokens"] <= 20_000 + 11_000 + 500  # a group's ten calls, and its rollouts
    trained = [event for event in run.lines("events") if event["event"] == "step"]
    scored = {event["group"] for event in run.lines("events") if event["event"] == "score" and "error" not in event}
    assert {group for event in trained for group in event["groups"]} <= scored


def test_a_budget_of_money_needs_prices(run_scripted: RunScripted) -> None:
    with pytest.raises(ConfigError, match=r"costs\.budget\.money needs prices"):
        run_scripted("costs.budget.money=1.0")


# ----------------------------------------------------------------------------------------------------------------------
# Prediction


@pytest.mark.slow
def test_a_run_is_predicted_from_a_shorter_one(run_scripted: RunScripted, tmp_path: Path) -> None:
    short = run_scripted("training.steps=3", path=tmp_path / "short")
    longer = run_scripted("training.steps=12", "training.rollouts_per_group=8", path=tmp_path / "longer")
    assert longer.error is None
    config = longer.assembly.config
    found = predict(config, 10, short.path).to_dict(config)
    assert found["tokens"] == pytest.approx(longer.summary["costs"]["tokens"], rel=0.05)
    assert found["calls"] == longer.summary["costs"]["calls"] == 12 * 4 * 8 + 2 * 10
    assert "9 steps like its last 1" in found["how"]
    more = config.model_copy(update={"training": config.training.model_copy(update={"steps": 17})})
    assert predict(more, 10, longer.path).kinds["training"].calls == 17, "5 steps like the last 4: no rounding of each"
    same = predict(short.assembly.config, 10, short.path).to_dict(config)
    for kind, amounts in short.summary["costs"]["by_kind"].items():
        assert {**same["by_kind"][kind], "seconds": 0} == {**amounts, "seconds": 0}


@pytest.mark.slow
def test_without_a_run_the_prediction_names_its_assumptions(run_scripted: RunScripted, tmp_path: Path) -> None:
    config = run_scripted("training.steps=1").assembly.config
    found = predict(config, 10, None).to_dict(config)
    calls = 16 + 20
    most = config.rollout.max_response_tokens
    assert found["by_kind"] == {"sampling": {"calls": calls, "completion_tokens": calls * most}}
    assert "assumed, not measured" in found["how"]
    with pytest.raises(ConfigError, match=r"nothing is not a run folder: it has no run\.toml; name the folder of"):
        predict(config, 10, tmp_path / "nothing")
