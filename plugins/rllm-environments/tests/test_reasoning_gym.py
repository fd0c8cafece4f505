from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from rllm_environments.reasoning_gym import child, datasets, presets
from rllm_environments.reasoning_gym.audit import CANARIES, JUNK
from rllm_environments.reasoning_gym.workflow import ASK_FOR_TAGS, ReasoningGymConfig, ReasoningGymWorkflow

from rllm_core.engine import RolloutEngine, TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.sandbox import CodeResult, Sandbox
from rllm_core.services import Score, Services
from rllm_core.types import FinishReason, Task, TerminationReason, TokenOutput, token_ids
from rllm_devkit.checks import check_workflow
from rllm_devkit.scripted import ByteParser

NAMES = datasets.variants()
EXECUTING = [name for name in NAMES if datasets.findings(name)["executes_answers"]]
PLAYED = [name for name in NAMES if datasets.findings(name)["played"]]
SAMPLE = ["arc_agi", "isomorphic_strings"]


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path, monkeypatch):
    """Takes the files that some generators write, as that of codeio; child processes begin in this folder, too."""
    monkeypatch.chdir(tmp_path)


def sampled(names, sample):
    """Parameters for a test: the sample in every run, the others by hand."""
    return [name if name in sample else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Says(RolloutEngine):
    """Answers every prompt with one text; one that ends in ``[cut off]`` has no stop token."""

    name = "says"

    def __init__(self, text: str) -> None:
        self.parser = ByteParser()
        self.text = text
        self.prompts: list[str] = []

    @property
    def supports_token_in_token_out(self) -> bool:
        return True

    async def get_token_output_from_token_input(self, token_input, *, sampling_params, seed, is_validation=False):
        self.prompts.append(bytes(token for token in token_input if token < 256).decode())
        is_cut_off = self.text.endswith("[cut off]")
        ids = [*self.text.encode("utf-8", "surrogatepass"), *([] if is_cut_off else [ByteParser.END])]
        return TokenOutput(
            token_ids=token_ids(ids),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.LENGTH if is_cut_off else FinishReason.STOP,
            weight_version=0,
        )


def play(workflow, task, *said):
    """Runs one rollout for each text, and closes the workflow; returns the episodes and the last prompt."""

    async def run():
        try:
            engines = [Says(text) for text in said]
            episodes = [await workflow.run(task, TITOCompleter(engine)) for engine in engines]
            return episodes, engines[-1].prompts[0]
        finally:
            await workflow.close()
            await workflow.services.close()

    return asyncio.run(run())


def rewards(episodes):
    return [episode.trajectories[0].total_reward for episode in episodes]


def questions(workflow, split, count):
    async def ask():
        try:
            return [(await workflow.question(task))[1] for task in workflow.tasks(split)[:count]]
        finally:
            await workflow.close()

    return asyncio.run(ask())


@pytest.fixture
def no_sandbox(monkeypatch):
    """As on a machine without a sandbox that isolates."""

    def none(services):
        raise ConfigError("no sandbox isolates")

    monkeypatch.setattr(Services, "isolating_sandbox", none)


def made(name, **more):
    return ReasoningGymWorkflow(ReasoningGymConfig(environment=name, **more))


def peers_own(task, index):
    """The dataset and the entry as reasoning-gym's own users create them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym

        name, options, seed, size = child.key_of(task.data)
        dataset = reasoning_gym.create_dataset(name, **json.loads(options), seed=seed, size=size)
        return dataset, dataset[index]


# ----------------------------------------------------------------------------------------------------------------------
# Rollouts


def test_a_rollout_asks_the_question_and_pays_what_the_checker_pays():
    workflow = made("spell_backward", options={"min_word_len": 3, "max_word_len": 3})
    task = workflow.tasks("train")[0]
    [question] = questions(workflow, "train", 1)
    word = question.split()[-1]
    half = word[:-4:-1][:2] + "?"
    episodes, prompt = play(workflow, task, word[::-1], f" {word[::-1].upper()}\n", half, f"{word[::-1]}[cut off]")
    assert question in prompt
    assert [episode.is_correct for episode in episodes] == [True, True, False, False]
    assert rewards(episodes)[:2] == [1.0, 1.0]
    assert 0.0 < rewards(episodes)[2] < 1.0
    assert rewards(episodes)[3] == 0.0
    assert episodes[3].termination_reason is TerminationReason.MAX_RESPONSE_TOKENS
    assert [episode.metrics["answered"] for episode in episodes] == [1.0, 1.0, 1.0, 0.0]


def test_with_tags_only_the_last_tagged_text_is_the_answer():
    workflow = made("chain_sum", answer="tags")
    task = workflow.tasks("train")[0]
    index, _ = asyncio.run(workflow.question(task))
    _, entry = peers_own(task, index)
    right = entry["answer"]
    said = [f"so\n<answer> {right} </answer>", right, f"<answer>{right}</answer><answer>no</answer>", "<answer>"]
    episodes, prompt = play(workflow, task, *said)
    assert ASK_FOR_TAGS in prompt
    assert [episode.is_correct for episode in episodes] == [True, False, False, False]
    assert [episode.metrics["answered"] for episode in episodes] == [1.0, 0.0, 1.0, 0.0]


def test_a_checker_that_raises_rejects_the_answer():
    workflow = made("prime_factorization")
    [episode], _ = play(workflow, workflow.tasks("train")[0], "no factors")
    assert rewards([episode]) == [0.0]
    assert episode.metrics["rejected"] == 1.0
    assert episode.termination_reason is TerminationReason.DONE


def test_a_checker_beyond_its_time_rejects_the_answer():
    workflow = made("n_queens", allow_code_execution=True, check_timeout_seconds=0.2)
    [episode], _ = play(workflow, workflow.tasks("train")[0], "sum(1 for _ in iter(int, 1))")
    assert rewards([episode]) == [0.0]
    assert episode.metrics["answered"] == episode.metrics["rejected"] == 1.0


def test_waiting_does_not_count_toward_the_time_of_a_checker():
    workflow = made("binary_matrix", allow_code_execution=True, check_timeout_seconds=0.5)
    task = workflow.tasks("train")[0]
    index, _ = asyncio.run(workflow.question(task))
    matrix = [[int(cell) for cell in row.split()] for row in peers_own(task, index)[1]["answer"].splitlines()]
    [episode], _ = play(workflow, task, f"__import__('time').sleep(1) or {matrix}")
    assert episode.metrics["rejected"] == 0.0
    assert rewards([episode]) == [0.1], "the right answer in another form"


def test_a_checker_that_something_has_killed_is_asked_again(tmp_path):
    """Its process dies on the first call only, and then on each."""
    workflow = made("binary_matrix", allow_code_execution=True)
    killed = tmp_path / "killed"
    kill = "__import__('os').kill(__import__('os').getpid(), 9)"
    once = f"[[__import__('os').path.exists({str(killed)!r}) or (open({str(killed)!r}, 'w'), {kill})]]"
    episodes, _ = play(workflow, workflow.tasks("train")[0], once, kill)
    assert killed.exists()
    assert [episode.metrics["rejected"] for episode in episodes] == [0.0, 1.0]
    assert rewards(episodes)[1] == 0.0


def test_a_question_that_cannot_be_created_again_fails_the_rollout():
    workflow = made("chain_sum")
    task = workflow.tasks("train")[0]
    broken = Task(task_id="broken", data={**task.data, "options": {"min_terms": -1}})
    workflow._questions["broken"] = (0, "1 + 1?")
    with pytest.raises(Exception, match="min_terms"):
        play(workflow, broken, "1")


REFERENCE = """
import json, sys, warnings

warnings.simplefilter("ignore")
result, sys.stdout = sys.stdout, sys.stderr  # some datasets print
import reasoning_gym

call = json.load(sys.stdin)
dataset = reasoning_gym.create_dataset(call["name"], seed=call["seed"], size=call["size"])
entry = dataset[call["index"]]
own = entry["answer"]
answers = [str(dataset[call["index"] + 1]["answer"]), *call["junk"]]
if own is not None:
    answers += [own, own.upper(), own[:-1], f"{own} {own}", f"[{own}]", own[::-1]]
scores = []
for answer in answers:
    try:
        scores.append(float(dataset.score_answer(answer.strip(), entry)))
    except Exception:
        scores.append(0.0)
print(json.dumps([own, answers, scores]), file=result)
"""


def scored_by_the_peer(name, task, index):
    """The dataset's own answer, some answers, and what reasoning-gym gives them, in an interpreter without us."""
    _, _, seed, size = child.key_of(task.data)
    call = {"name": name, "seed": seed, "size": size, "index": index, "junk": JUNK[1:6]}
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE],
        input=json.dumps(call),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", sampled(PLAYED, SAMPLE))
def test_rewards_equal_the_peers_own(name):
    """Twelve answers for each dataset, more than 1,000 in all, each through a whole rollout."""
    workflow = made(name)
    task = workflow.tasks("validation")[0]
    index, _ = asyncio.run(workflow.question(task))
    own, answers, scores = scored_by_the_peer(name, task, index)
    episodes, _ = play(workflow, task, *answers)
    assert rewards(episodes) == scores
    if own is not None:
        assert scores[answers.index(own)] == 1.0


def test_rollouts_with_the_same_answer_at_the_same_time_share_a_call_that_none_of_them_can_cancel():
    workflow = ReasoningGymWorkflow(ReasoningGymConfig(environment="chain_sum"), found=datasets.findings("chain_sum"))
    task = workflow.tasks("train")[0]
    asked = []

    async def grade(task, text):
        asked.append(text)
        await asyncio.sleep(0.01)
        if text == "bad":
            raise ValueError(text)
        return Score(float(len(asked)))

    vars(workflow)["_grade"] = grade

    async def run():
        first, *others = [asyncio.ensure_future(workflow.score(task, 0, "5")) for _ in range(8)]
        await asyncio.sleep(0)
        first.cancel()
        found = await asyncio.gather(*others, workflow.score(task, 0, "6"))
        failed = await asyncio.gather(*(workflow.score(task, 0, "bad") for _ in range(2)), return_exceptions=True)
        return found, await workflow.score(task, 0, "5"), [type(error) for error in failed]

    found, later, failed = asyncio.run(run())
    assert found == [2.0] * 8
    assert later == 4.0
    assert failed == [ValueError, ValueError]
    assert asked == ["5", "6", "bad", "5"]


@pytest.mark.slow
def test_the_contract_of_a_workflow_is_kept():
    results = asyncio.run(
        check_workflow(lambda: made("chain_sum"), answers=["1"], tasks_per_split=1, rollout_timeout_seconds=300.0)
    )
    assert not [result for result in results if result.outcome == "failed"]


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.mark.parametrize("name", sampled([name for name in NAMES if not datasets.findings(name)["refused"]], SAMPLE))
def test_splits_share_no_question_in_any_case_of_letters(name):
    count = 5 if datasets.findings(name)["slow"] else 60
    workflow = made(name, allow_code_execution=True)
    train, validation = (
        {question.casefold() for question in questions(workflow, split, count)} for split in ("train", "validation")
    )
    assert train
    assert validation
    assert not train & validation


def test_splits_of_other_seeds_share_no_question_either():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train = set(questions(made("chain_sum", options=options, seed=1), "train", 300))
    validation = set(questions(made("chain_sum", options=options, seed=2), "validation", 100))
    assert len(validation) > 10
    assert not train & validation


def test_tasks_are_created_on_demand():
    workflow = made("knight_swap", train_size=1_000_000)
    tasks = workflow.tasks("train")
    assert len(tasks) == 1_000_000
    assert tasks[999_999].task_id == "knight_swap-0-train-999999"
    assert len(tasks[10:20]) == 10
    assert "question" not in tasks[0].data
    asyncio.run(workflow.close())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "chain_summ"}, "did you mean chain_sum"),
        ({"environment": "game_of_life_halting"}, "failed its audit"),
        ({"environment": "n_queens"}, "allow_code_execution = true"),
        ({"environment": "chain_sum", "options": {"min_digit": 1}}, "min_digit"),
        ({"environment": "chain_sum", "options": {"min_terms": -1}}, "min_terms"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(settings, message, no_sandbox):
    workflow = ReasoningGymWorkflow(ReasoningGymConfig(**settings))
    with pytest.raises(ConfigError, match=message) as raised:
        workflow.tasks("train")
    assert "\n" not in str(raised.value)


def test_another_version_of_the_package_is_refused(monkeypatch):
    monkeypatch.setattr("rllm_environments.catalog.installed_version", lambda distribution: "0.1.99")
    with pytest.raises(ConfigError, match=r"0\.1\.99 has no audit"):
        made("chain_sum").tasks("train")


# ----------------------------------------------------------------------------------------------------------------------
# Checkers that execute answers


def test_the_checkers_that_execute_answers_are_those_that_are_known():
    known = "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24"
    assert [*known.split(), "simple_integration", "spiral_matrix", "string_insertion"] == EXECUTING


@pytest.mark.parametrize("name", sampled(NAMES, ["boxnet", "countdown"]))
def test_no_answer_creates_a_file(name, tmp_path, no_sandbox):
    """A canary: its answers create a file if anything executes them, and a run that would is refused."""
    path = tmp_path / "canary"
    answers = [template.format(path=str(path)) for template in CANARIES]
    workflow = made(name)
    if datasets.findings(name)["refused"] or name in EXECUTING:
        with pytest.raises(ConfigError):
            workflow.tasks("train")
    else:
        play(workflow, workflow.tasks("train")[0], *answers)
    assert not path.exists()
    if name in EXECUTING:  # the canary works
        allowed = made(name, allow_code_execution=True)
        play(allowed, allowed.tasks("train")[0], *answers)
        assert path.exists()


class Isolated(Sandbox):
    """Claims to isolate, and counts programs instead of isolating them."""

    name = "isolated"
    isolates = True
    programs = 0

    async def run_python(self, source, *, stdin="", limits=None):
        self.programs += 1
        command = [sys.executable, "-I", "-c", source]
        done = await asyncio.to_thread(
            subprocess.run, command, input=stdin, capture_output=True, text=True, check=False
        )
        return CodeResult(
            outcome="finished", exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr, wall_seconds=0.0
        )


def test_in_a_sandbox_that_isolates_these_checkers_run_there_and_nowhere_else():
    workflow = made("n_queens")
    sandbox = vars(workflow.services)["_isolating"] = Isolated()
    task = workflow.tasks("train")[0]
    index, _ = asyncio.run(workflow.question(task))
    dataset, entry = peers_own(task, index)
    right = entry["metadata"]["valid_answers"][0]
    episodes, _ = play(workflow, task, right, "no board", "__import__('os')._exit(0)")
    assert sandbox.programs == 4, "a checker whose process dies is asked again"
    assert rewards(episodes) == [dataset.score_answer(right, entry), dataset.score_answer("no board", entry), 0.0]
    assert rewards(episodes)[0] == 1.0
    assert episodes[2].metrics["rejected"] == 1.0


# ----------------------------------------------------------------------------------------------------------------------
# Warm starts and presets


def test_a_warm_start_teaches_the_letters_of_training_questions_in_any_order():
    options = {"min_word_len": 3, "max_word_len": 3}
    workflow, again = (made("spell_backward", options=options) for _ in range(2))
    drawn = list(itertools.islice(workflow.warm_start(random.Random(1)), 300))
    assert drawn == list(itertools.islice(again.warm_start(random.Random(1)), 300))
    held_out = {
        question.casefold() for question in questions(made("spell_backward", options=options), "validation", 200)
    }
    is_right = []
    for user, assistant in drawn:
        word = user["content"].split()[-1]
        assert user["content"].casefold() not in held_out
        assert sorted(assistant["content"].lower()) == sorted(word.lower())
        is_right.append(assistant["content"] == word[::-1])
    assert 0.05 < sum(is_right) / len(is_right) < 0.4


def test_elsewhere_a_warm_start_has_answers_of_other_questions():
    workflow = made("chain_sum", answer="tags")
    drawn = list(itertools.islice(workflow.warm_start(random.Random(1)), 50))
    assert all(system["content"] == ASK_FOR_TAGS for system, _, _ in drawn)
    assert all(assistant["content"].startswith("<answer>") for _, _, assistant in drawn)


def test_the_preset_depends_on_the_dataset_and_the_model():
    own = presets.run_file({}).tables
    assert own["reasoning_gym"]["options"] == {"min_word_len": 3, "max_word_len": 3}
    assert "reasoning_gym" not in presets.run_file({"reasoning_gym": {"environment": "chain_sum"}}).tables
    large = presets.run_file({"model": {"path": "some/model"}}).tables
    assert large["reasoning_gym"] == {"answer": "tags"}
    assert large["optimizer"]["learning_rate"] < own["optimizer"]["learning_rate"]


def test_run_files_of_the_examples_are_for_known_datasets():
    import tomllib

    files = sorted((Path(__file__).parents[3] / "examples" / "reasoning-gym").glob("*.toml"))
    assert len(files) == 2
    for file in files:
        name, _, environment = tomllib.loads(file.read_text(encoding="utf-8"))["workflow"].partition("/")
        assert name == "reasoning_gym"
        assert datasets.findings(environment)["played"]
