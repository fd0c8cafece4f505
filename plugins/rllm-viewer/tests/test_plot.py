"""Tests what the plot of a run draws: data and labels, not pixels."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rllm_viewer.plot import drawn, smoothed


def row(step: int, reward: float, **more: float) -> dict[str, Any]:
    return {"step": step, "reward_mean": reward, **more}


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.lines}


def figure(rows: list[dict[str, Any]], validations: list[dict[str, Any]] | None = None) -> Any:
    found = drawn(rows, validations or [], "run")
    assert found is not None
    return found


def test_a_few_steps_are_drawn_as_they_are() -> None:
    main = figure([row(step, step / 10) for step in (1, 2, 3)]).axes[0]
    assert list(lines(main)) == ["training reward"]
    assert list(lines(main)["training reward"].get_ydata()) == [0.1, 0.2, 0.3]


def test_smoothing_says_its_window_and_is_neither_late_nor_longer_than_the_data() -> None:
    main = figure([row(step, float(step)) for step in range(1, 101)]).axes[0]
    raw, mean = main.lines
    assert mean.get_label() == "mean of 9 steps, centered"
    assert raw.get_alpha() < 1
    assert list(mean.get_xdata()) == list(range(1, 101))
    inside = slice(4, -4)
    assert mean.get_ydata()[inside] == pytest.approx(raw.get_ydata()[inside])  # the mean of a straight line is the line


def test_smoothing_averages_what_is_around() -> None:
    assert smoothed([0.0, 3.0, 0.0, 0.0, 10.0], 3) == pytest.approx([1.5, 1.0, 1.0, 10 / 3, 5.0])


def test_validations_are_points_and_the_first_is_the_baseline() -> None:
    validations = [{"step": 0, "reward_mean": 0.1, "solved": None}, {"step": 3, "reward_mean": 0.6, "solved": None}]
    drawn_lines = lines(figure([row(step, 0.5) for step in (1, 2, 3)], validations).axes[0])
    points, baseline = drawn_lines["validation reward"], drawn_lines["first validation"]
    assert points.get_linestyle() == "None"
    assert list(points.get_ydata()) == [0.1, 0.6]
    assert list(baseline.get_ydata()) == [0.1, 0.1]
    assert "validation solve rate" not in drawn_lines


def test_the_range_of_the_trajectories_is_a_band() -> None:
    rows = [row(step, 0.5, trajectory_reward_min=0.0, trajectory_reward_max=1.0) for step in (1, 2, 3)]
    [band] = figure(rows).axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.0, 1.0)
    assert not figure([row(1, 0.5)]).axes[0].collections


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_equal_values_keep_a_readable_axis(value: float) -> None:
    bottom, top = figure([row(step, value) for step in range(1, 40)]).axes[0].get_ylim()
    assert bottom <= value - 0.5
    assert top >= value + 0.5


def test_a_value_that_is_missing_leaves_a_gap() -> None:
    rows = [row(1, 0.1, solved=0.2), row(2, math.nan), {"step": 3}, {"step": 4, "reward_mean": None}, row(5, 0.5)]
    main, solved = figure(rows).axes
    for axes, values in ((main, [0.1, None, None, None, 0.5]), (solved, [0.2, None, None, None, None])):
        line = axes.lines[0]
        assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
        assert [None if math.isnan(value) else value for value in line.get_ydata()] == values


def test_smoothing_keeps_gaps_and_averages_around_them() -> None:
    values = smoothed([1.0, math.nan, 3.0, math.nan], 3)
    assert [None if math.isnan(value) else value for value in values] == [1.0, None, 3.0, None]
    assert smoothed([1.0, math.nan, 3.0, 6.0], 5)[0] == 2.0


def test_the_range_leaves_a_gap_where_a_step_has_none() -> None:
    edges = {"trajectory_reward_min": 0.0, "trajectory_reward_max": 1.0}
    rows = [row(step, 0.5, **({} if step in (3, 4) else edges)) for step in range(1, 7)]
    [band] = figure(rows).axes[0].collections
    assert [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in band.get_paths()] == [(1, 2), (5, 6)]


def test_panels_only_for_what_was_measured() -> None:
    everything = {"solved": 0.5, "response_tokens_mean": 6.0, "staleness_mean": 0.0}
    titles = [axes.get_title() for axes in figure([row(1, 0.5, **everything), row(2, 0.5, **everything)]).axes]
    assert titles == ["run", "solved", "length", "staleness"]
    assert [axes.get_title() for axes in figure([row(1, 0.5, staleness_mean=0.0)]).axes] == ["run", "staleness"]
    assert len(figure([row(1, 0.5)]).axes) == 1


def test_a_run_without_rewards_shows_its_loss() -> None:
    validations = [{"step": 0, "reward_mean": None, "nll_per_token": 3.0}]
    main = figure([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], validations).axes[0]
    assert list(lines(main)["training loss"].get_ydata()) == [2.0, 1.0]
    assert list(lines(main)["validation"].get_ydata()) == [3.0]


def test_a_run_without_steps_can_be_drawn() -> None:
    assert not figure([]).axes[0].lines
