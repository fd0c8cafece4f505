"""Tests which tasks ``difficulty`` prefers, puts away and visits again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from rllm_samplers.difficulty import MAX_SOLVE_RATES, Difficulty

from rllm_core.algorithms.task_sampler import GroupResult
from rllm_core.errors import ConfigError
from rllm_core.types import Task
from rllm_core.workflow import LazyTasks
from rllm_devkit.checks.task_samplers import some_tasks

Solve = Callable[[int, int], float | None]


def result(ordinal: int, position: int, solved: float | None, rewards: tuple[float, ...] = ()) -> GroupResult:
    return GroupResult(ordinal, position, "trained", "trained", solved, rewards, weight_version=0, step=1)


def played(
    sampler: Difficulty, solve: Solve, draws: int, *, tasks: int | Sequence[Task] = 200, window: int = 8
) -> list[int]:
    """Plays windows of draws in a synchronous run, in which ``solve`` gives the solved share of a draw."""
    sampler.begin(some_tasks(tasks) if isinstance(tasks, int) else tasks, seed=3)
    drawn: list[int] = []
    while len(drawn) < draws:
        positions = sampler.next(window)
        for ordinal, position in enumerate(positions, len(drawn)):
            sampler.observe(result(ordinal, position, solve(position, ordinal)))
        drawn += positions
    return drawn


def test_tasks_that_teach_come_most_and_the_others_now_and_then() -> None:
    """A fifth of the tasks is solved by some rollouts, the others by none or by all."""
    drawn = played(Difficulty({"spacing": 20}), lambda task, ordinal: {0: 0.5, 1: 1.0}.get(task % 5, 0.0), 3000)
    late = Counter("mixed" if task % 5 == 0 else "solved" if task % 5 == 1 else "unsolved" for task in drawn[1000:])
    assert late["mixed"] > 0.8 * late.total(), "uniform: 0.2"
    assert late["solved"] > 0
    assert late["unsolved"] > 0
    away = [task for task in drawn[1000:] if task % 5 > 1]
    assert len(set(away)) == len(away) or len(set(away)) == 120, "who waited longest comes first"


def test_what_was_put_away_comes_back_when_it_has_become_solvable() -> None:
    drawn = played(
        Difficulty({"spacing": 20}), lambda task, ordinal: 0.5 if task % 2 == 0 or ordinal > 1500 else 0.0, 3000
    )
    assert sum(task % 2 for task in drawn[1000:1500]) < 0.3 * 500
    assert sum(task % 2 for task in drawn[2500:3000]) > 0.4 * 500


def test_a_task_does_not_come_again_soon() -> None:
    for spacing, expected in ((50, 50), (1000, 100), (0, 0)):
        drawn = played(Difficulty({"spacing": spacing}), lambda task, ordinal: 0.5, 2000, window=1)
        last: dict[int, int] = {}
        gaps = []
        for ordinal, task in enumerate(drawn):
            gaps += [ordinal - last[task]] if task in last else []
            last[task] = ordinal
        assert min(gaps) > expected


def test_new_tasks_come_while_they_teach_and_a_few_are_tried_anyway() -> None:
    drawn = played(Difficulty({"spacing": 20}), lambda task, ordinal: 0.5 if ordinal < 100 else 0.0, 800, tasks=5000)
    assert len(set(drawn[100:800])) > 300
    lazy = LazyTasks(lambda number: Task(task_id=str(number)))
    sampler = Difficulty()
    sampler.begin(lazy, seed=0)
    endless = sampler.next(600)
    for ordinal, position in enumerate(endless):
        sampler.observe(result(ordinal, position, 0.0))
    assert len(set(endless + sampler.next(100))) >= 600


@pytest.mark.parametrize(
    ("by", "solved", "rewards", "expected"),
    [
        ("solved", 0.125, (0.9, 1.0), "hard"),
        ("solved", 0.5, (1.0, 0.0), "medium"),
        ("solved", 0.875, (0.2, 0.1), "easy"),
        ("solved", 0.0, (0.2, 0.1), "unsolved"),
        ("solved", 1.0, (0.9, 1.0), "solved"),
        ("solved", None, (0.2, 0.1), "medium"),
        ("rewards", 0.0, (0.2, 0.1), "medium"),
        ("rewards", 0.0, (5.0, 2.0), "easy"),
        ("rewards", None, (5.0, 5.0), "solved"),
        ("rewards", None, (-5.0, -5.0), "unsolved"),
        ("rewards", 1.0, (), "solved"),
        ("solved", None, (), "medium"),
    ],
)
def test_classes(by: str, solved: float | None, rewards: tuple[float, ...], expected: str) -> None:
    sampler = Difficulty({"by": by})
    sampler.begin(some_tasks(4), seed=0)
    first, second = sampler.next(2)
    sampler.observe(result(0, first, 0.5, (5.0, -5.0)))
    before = sampler.metrics()[f"{expected}_tasks"]
    sampler.observe(result(1, second, solved, rewards))
    assert sampler.metrics()[f"{expected}_tasks"] == before + 1


@pytest.mark.parametrize(("rewards", "mixed"), [((0.1 + 0.2, 0.3), 0.0), ((0.3, 0.30001), 1.0), ((0.3, 0.3), 0.0)])
def test_rewards_that_differ_only_in_rounding_are_equal(rewards: tuple[float, ...], mixed: float) -> None:
    """Such a group is filtered as uniform, so it is not mixed."""
    sampler = Difficulty({"by": "rewards"})
    sampler.begin(some_tasks(4), seed=0)
    [position] = sampler.next(1)
    sampler.observe(result(0, position, None, rewards))
    assert sampler.metrics()["new_yield"] == mixed


def test_one_group_does_not_put_a_known_task_away() -> None:
    sampler = Difficulty({"spacing": 0})
    sampler.begin(some_tasks(1), seed=0)
    classes = []
    for ordinal, solved in enumerate((0.5, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)):
        sampler.observe(result(ordinal, *sampler.next(1), solved))
        metrics = sampler.metrics()
        classes += [name for name in MAX_SOLVE_RATES if metrics[f"{name}_tasks"]]
    assert classes == ["medium", "easy", "easy", "solved", "medium", "hard", "hard", "unsolved"]
    assert sampler.metrics()["solved_yield"] < sampler.metrics()["new_yield"] == 1.0


def test_what_is_known_of_a_subset_goes_for_its_new_tasks() -> None:
    """A tenth of the subsets teaches; no task comes twice, so nothing is known of the tasks themselves."""
    tasks = [Task(task_id=str(number), data={"level": number % 10}) for number in range(5000)]
    shares = {}
    for subsets in ("level", ""):
        sampler = Difficulty({"subsets": subsets})
        drawn = played(sampler, lambda task, ordinal: 0.5 if task % 10 == 3 else 0.0, 480, tasks=tasks)
        assert len(set(drawn)) == len(drawn)
        shares[subsets] = sum(task % 10 == 3 for task in drawn[160:]) / len(drawn[160:])
        assert {task % 10 for task in drawn[160:]} == set(range(10)), "the others are still tried"
    assert shares["level"] > 0.7, shares
    assert shares[""] < 0.2, shares


def test_endless_tasks_that_do_not_teach_give_way_to_known_ones() -> None:
    lazy = LazyTasks(lambda number: Task(task_id=str(number)))
    drawn = played(Difficulty({"spacing": 20}), lambda task, ordinal: float(task % 20 == 0) / 2, 6000, tasks=lazy)
    again = drawn[5000:]
    assert 0.1 < sum(task in set(drawn[:5000]) for task in again) / len(again) < 0.95


def test_a_checkpoint_of_other_subsets_is_refused() -> None:
    sampler, other = Difficulty({"subsets": "subset"}), Difficulty()
    for one in (sampler, other):
        one.begin(some_tasks(4), seed=0)
    with pytest.raises(ConfigError, match=r"has new tasks in new/a, new/b, but the run file in new;.*sampler_options"):
        other.load_state_dict(sampler.state_dict())


def test_a_key_that_tasks_lack_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler_options\.subsets = 'level': task .* has no such key"):
        Difficulty({"subsets": "level"}).begin(some_tasks(4), seed=0)


def test_a_checkpoint_of_other_tasks_is_refused() -> None:
    sampler, other = Difficulty(), Difficulty()
    sampler.begin(some_tasks(4), seed=0)
    other.begin(some_tasks(5), seed=0)
    with pytest.raises(ConfigError, match="has 4 training tasks, but there are 5"):
        other.load_state_dict(sampler.state_dict())
