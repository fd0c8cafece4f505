from __future__ import annotations

import pytest
from pydantic import ValidationError
from rllm_workflows.guess import GuessConfig, GuessWorkflow, parse_guess

from rllm_core.types import Task, TerminationReason

DONE, MAX_TURNS, CUT = TerminationReason.DONE, TerminationReason.MAX_TURNS, TerminationReason.MAX_RESPONSE_TOKENS


def secret(number):
    return Task(task_id=f"guess-train-{number}", data={"secret": number})


@pytest.mark.parametrize(
    ("answers", "reward", "reason"),
    [
        (["3"], 1.0, DONE),
        (["5", "5lower3"], 1.0, DONE),
        (["1", "1higher5", "5lower3"], 1.0, DONE),
        (["1", "1higher2", "2higher5"], 0.0, MAX_TURNS),
        (["9", "9lower7", "7lower6"], 0.0, MAX_TURNS),
        (["three"], -1.0, DONE),
        (["-3"], -1.0, DONE),
        (["３"], -1.0, DONE),  # noqa: RUF001
        (["٣"], -1.0, DONE),
        (["3.0"], -1.0, DONE),
        (["99999999999999999999"], -1.0, DONE),
        (["3[cut off]"], -1.0, CUT),
        (["1", "3"], -1.0, DONE),
        (["1", "1lower3"], -1.0, DONE),
        (["1", "2higher3"], -1.0, DONE),
        (["1", "1higher"], -1.0, DONE),
        (["1", "1higher 3"], -1.0, DONE),
        (["1", "1higher2", "1higher3"], -1.0, DONE),
        (["1", "1higher3[cut off]"], -1.0, CUT),
    ],
)
def test_rewards(play, answers, reward, reason):
    episode, _ = play(GuessWorkflow(), secret(3), *answers)
    [trajectory] = episode.trajectories
    assert trajectory.total_reward == reward
    assert episode.is_correct is (reward == 1.0)
    assert episode.termination_reason is reason
    assert len(trajectory.steps) == len(answers)
    assert episode.metrics == {"turns": len(answers), "invalid": float(reward == -1.0)}


def test_an_echo_is_of_the_number_not_of_its_spelling(play):
    assert play(GuessWorkflow(), secret(3), "01", "1higher3")[0].is_correct
    assert not play(GuessWorkflow(), secret(3), "01", "01higher3")[0].is_correct


def test_the_model_hears_the_truth_and_the_rollout_is_one_token_sequence(play):
    episode, engine = play(GuessWorkflow(), secret(3), "1", "1higher5", "5lower4")
    assert "1-5?" in engine.prompts[0]
    assert engine.prompts[1].endswith("higherassistant\n")
    assert engine.prompts[2].endswith("lowerassistant\n")
    assert {step.segment for step in episode.trajectories[0].steps} == {0}


def test_the_first_answer_needs_no_echo_and_an_echo_needs_a_number():
    assert parse_guess("4", "") == 4
    assert parse_guess("4higher", "4higher") is None
    assert parse_guess("4higher12", "4higher") == 12
    assert parse_guess("", "") is None


def test_every_secret_is_in_both_splits_under_ids_of_its_own():
    workflow = GuessWorkflow(GuessConfig(low=2, high=8))
    train, validation = workflow.tasks("train"), workflow.tasks("validation")
    assert [task.data["secret"] for task in train] == [task.data["secret"] for task in validation] == [*range(2, 9)]
    assert not {task.task_id for task in train} & {task.task_id for task in validation}
    assert train == GuessWorkflow(GuessConfig(low=2, high=8)).tasks("train")


def test_the_number_of_turns_is_that_of_the_section(play):
    workflow = GuessWorkflow(GuessConfig(turns=1))
    assert play(workflow, secret(3), "1")[0].termination_reason is MAX_TURNS


@pytest.mark.parametrize("section", [{"low": 5, "high": 5}, {"low": -1}, {"high": 1000}, {"turns": 0}, {"turn": 3}])
def test_bad_sections(section):
    with pytest.raises(ValidationError):
        GuessConfig(**section)
