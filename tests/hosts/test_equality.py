"""Tests that a rollout in a worker is the rollout that it would have been in the process of the run."""

from __future__ import annotations

from typing import Any

import pytest
from hosted import Inline, play

from rllm_core.errors import ConfigError
from rllm_core.types import Episode
from rllm_devkit.scripted import Script

FINE = ["plain", "turns", "list", "edited", "forks", "branches", "tokens", "tools", "looks", "written", "counts"]
WRONG = [
    "raises", "exits", "terminates", "times_out", "engine_error", "cancelled", "none", "nan", "no_reward", "twice",
    "changed", "forks_another", "too_many", "bad_message", "surrogate", "wrong_items",
]  # fmt: skip


def comparable(episode: Episode) -> dict[str, Any]:
    """Everything but the ids of steps, which are random, and where in the core the traceback begins."""
    written = episode.model_dump(mode="json")
    for trajectory in written["trajectories"]:
        for step in trajectory["steps"]:
            del step["step_id"]
    trace = written["metadata"].pop("traceback", None)
    return written | {"last line": trace and trace.strip().splitlines()[-1]}


@pytest.fixture(scope="module")
def both() -> dict[str, tuple[Episode, Episode]]:
    """Episodes of all tasks, in the process and in a worker."""
    tasks, options = [*FINE, *WRONG], {"max_attempts": 1, "max_response_tokens": 40}
    inline = play("Talk", tasks, host=Inline, **options).episodes
    worker = play("Talk", tasks, workers=2, **options).episodes
    return dict(zip(tasks, zip(inline, worker, strict=True), strict=True))


@pytest.mark.parametrize("task", FINE)
def test_episodes_are_equal(both: dict[str, tuple[Episode, Episode]], task: str) -> None:
    inline, worker = both[task]
    assert not inline.termination_reason.is_failure, inline.error
    assert comparable(worker) == comparable(inline)


@pytest.mark.parametrize("task", WRONG)
def test_failures_are_equal(both: dict[str, tuple[Episode, Episode]], task: str) -> None:
    inline, worker = both[task]
    assert inline.termination_reason.is_failure or inline.termination_reason.value == "max_turns_exceeded"
    assert inline.error
    assert comparable(worker) == comparable(inline)


def test_a_step_of_another_rollout_is_refused() -> None:
    [first, second] = play("Talk", ["foreign", "foreign"], workers=1, max_attempts=1).episodes
    reasons = {first.termination_reason.value, second.termination_reason.value}
    assert reasons == {"done", "error"}
    assert "not sampled in this rollout" in (first.error or second.error or "")


def test_what_only_the_user_can_fix_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="the data are wrong; fix them"):
        play("Talk", ["config_error"], workers=1)


def test_errors_of_the_engine_are_its_own() -> None:
    def failure(_: Any) -> Exception:
        from rllm_core.engine import EngineError

        return EngineError("503 overloaded")

    [episode] = play("Talk", ["plain"], workers=1, max_attempts=1, script=Script(failure=failure)).episodes
    assert episode.termination_reason.value == "engine_error"
    assert episode.error == "503 overloaded"


def test_a_prompt_that_is_too_long_terminates() -> None:
    [episode] = play("Talk", ["plain"], workers=1, max_attempts=1, max_prompt_tokens=3).episodes
    assert episode.termination_reason.value == "max_prompt_tokens_exceeded"


def test_a_call_can_be_given_up() -> None:
    [episode] = play("Talk", ["gives_up"], workers=1, max_attempts=1).episodes
    assert episode.termination_reason.value == "done"


def test_validation_rollouts_say_so() -> None:
    [episode] = play("Talk", ["looks"], workers=1, purpose="validation").episodes
    assert episode.metadata["validation"] is True
    assert episode.is_validation


def test_tools_are_timed_and_tokens_stay_with_the_driver() -> None:
    played = play("Talk", ["tools"], workers=1)
    kinds = [(call.kind, call.name) for call in played.rollouts[0].calls.calls]
    assert sorted(kinds) == [("model", ""), ("model", ""), ("model", ""), ("tool", "add")]
