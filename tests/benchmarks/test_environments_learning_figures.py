from __future__ import annotations

from benchmarks.environments_learning import figures, toml


def test_figures_are_those_of_the_worst_seed() -> None:
    rows = [
        {
            "kind": "training",
            "environment": "spell_backward",
            "before": before,
            "after": after,
            "cpu_seconds": seconds,
        }
        for before, after, seconds in ((0.1, 0.8, 90.0), (0.12, 0.75, 120.0), (0.09, 0.9, 100.0))
    ]
    assert figures([{"kind": "conditions"}, *rows]) == {
        "spell_backward_solved_before_max": 0.12,
        "spell_backward_solved_after_min": 0.75,
        "spell_backward_cpu_seconds_max": 120.0,
        "spell_backward_seeds": 3,
    }


def test_games_count_what_is_not_lost_and_verifiers_its_smallest_gain() -> None:
    games = {"kind": "training", "environment": "tictactoe", "before": 0.6, "after": 0.9, "cpu_seconds": 9.0}
    tasks = [
        {"kind": "training", "environment": "verifiers", "before": 0.3, "after": after, "cpu_seconds": 9.0}
        for after in (0.7, 0.8)
    ]
    found = figures([games, *tasks, {"kind": "random play", "environment": "tictactoe", "not_lost": 0.7}])
    assert found["tictactoe_not_lost_after_min"] == 0.9
    assert found["tictactoe_not_lost_random"] == 0.7
    assert found["verifiers_margin"] == 0.4


def test_overrides_are_written_as_toml() -> None:
    assert toml({"min_word_len": 3, "is_slippery": False}) == "{min_word_len = 3, is_slippery = false}"
    assert toml("TicTacToe-v0") == '"TicTacToe-v0"'
