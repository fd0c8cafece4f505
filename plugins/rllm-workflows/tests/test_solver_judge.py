from __future__ import annotations

import asyncio
import json
import random
from itertools import islice

import numpy as np
import pytest
from pydantic import ValidationError
from rllm_workflows import solver_judge_warm_start
from rllm_workflows.solver_judge import (
    SolverJudgeConfig,
    SolverJudgeWorkflow,
    all_or_none,
    is_held_out,
    judge_prompt,
    picked,
    prompt,
    run_file,
)

from rllm_core.algorithms.grouping import group_trajectories
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.engine import EngineError, RolloutEngine, TITOCompleter
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.types import FinishReason, Task, TerminationReason, TokenOutput, token_ids
from rllm_devkit.checks.workflows import check_workflow
from rllm_devkit.scripted import ByteParser
from rllm_viewer.verify import verify

TASK = Task(task_id="first-dbca", data={"word": "dbca", "answer": "a"})
CUT_OFF = "[cut off]"


class Panel(RolloutEngine):
    """Solvers that answer what they are told to, each after a delay of its own, and a judge that looks at its prompt.

    Args:
        solvers: Per solver its answer (an exception is raised), in the order in which they ask.
        judge: From the numbered answers of its prompt to what it says.
        delays: Per solver how many ticks of the event loop it takes.
    """

    name = "panel"

    def __init__(self, solvers, judge=None, delays=None):
        self.parser = ByteParser()
        self.solvers, self.judge, self.delays = solvers, judge, delays or [0] * len(solvers)
        self.asked, self.ended, self.at_once, self.most_at_once = 0, [], 0, 0
        self.shown = []

    @property
    def supports_token_in_token_out(self):
        return True

    async def get_token_output_from_token_input(self, token_input, *, sampling_params, seed, is_validation=False):
        text = bytes(token for token in token_input if token < 256).decode()
        lines = [line for line in text.split("\n") if line[:1].isdigit() and ": " in line]
        if lines:
            # What follows the last line is the parser's opening of the answer.
            self.shown = {number: given[:1] for number, given in (line.split(": ") for line in lines)}
            return self._output(self.judge(self.shown))
        number = self.asked
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(self.delays[number]):
            await asyncio.sleep(0)
        self.at_once -= 1
        self.ended.append(number)
        if isinstance(self.solvers[number], Exception):
            raise self.solvers[number]
        return self._output(self.solvers[number])

    @staticmethod
    def _output(text):
        cut = text.endswith(CUT_OFF)
        ids = [*text.removesuffix(CUT_OFF).encode(), *([] if cut else [ByteParser.END])]
        return TokenOutput(
            token_ids=token_ids(ids),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            weight_version=0,
        )


def played(panel, *, seed=0, **section):
    workflow = SolverJudgeWorkflow(SolverJudgeConfig(solvers=len(panel.solvers), explain=False, **section))
    return asyncio.run(workflow.run(TASK, TITOCompleter(panel, seed=seed)))


def by_solver(episode):
    return {t.metadata["solver_id"]: t for t in episode.trajectories if t.role == "solver"}


def judge_of(episode):
    [judge] = [trajectory for trajectory in episode.trajectories if trajectory.role == "judge"]
    return judge


def number_of(letter):
    return lambda shown: next(number for number, given in shown.items() if given == letter)


@pytest.mark.parametrize("delays", [[1, 1, 1, 1], [9, 3, 6, 1], [1, 9, 1, 9]])
def test_rewards_go_to_who_earned_them_however_long_each_took(delays):
    panel = Panel(["a", "b", "nonsense", "c"], number_of("a"), delays)
    episode = played(panel)
    assert panel.most_at_once == 4, "solvers answer at the same time"
    assert sorted(panel.ended) == [0, 1, 2, 3]
    if delays == [9, 3, 6, 1]:
        assert panel.ended == [3, 1, 2, 0]
    said = {name: (t.steps[0].text, t.total_reward) for name, t in by_solver(episode).items()}
    assert said == {
        "solver-1": ("a", 1.0),
        "solver-2": ("b", 0.0),
        "solver-3": ("nonsense", -1.0),
        "solver-4": ("c", 0.0),
    }
    judge = judge_of(episode)
    assert judge.metadata["picked"] == "solver-1"
    assert sorted(judge.metadata["shown"]) == ["solver-1", "solver-2", "solver-4"]
    assert judge.total_reward == pytest.approx(1 - 1 / 3)
    assert episode.is_correct is True


@pytest.mark.parametrize("seed", range(8))
def test_the_number_means_the_answer_that_stood_there(seed):
    panel = Panel(["b", "a", "x", "c", "a"], lambda shown: "2")
    episode = played(panel, seed=seed)
    judge = judge_of(episode)
    asked = judge.steps[0].messages[0]["content"]
    solvers = by_solver(episode)
    answers = [solvers[name].steps[0].text for name in judge.metadata["shown"]]
    assert asked == judge_prompt("dbca", answers)
    assert judge.metadata["picked"] == judge.metadata["shown"][1]
    assert episode.is_correct is (answers[1] == "a")
    assert judge.total_reward == pytest.approx((answers[1] == "a") - 0.5)


@pytest.mark.slow
def test_the_order_shown_depends_on_the_seed_and_on_nothing_else():
    def orders(delays):
        shown = [
            judge_of(played(Panel(list("abcd"), lambda s: "1", delays), seed=n)).metadata["shown"] for n in range(20)
        ]
        return [tuple(order) for order in shown]

    assert orders([0] * 4) == orders([5, 0, 2, 1])
    assert len(set(orders([0] * 4))) > 5


@pytest.mark.parametrize("said", ["0", "4", "99", "", "a", "-1", "1 2", "1.", "１", "9" * 5000, f"1{CUT_OFF}"])  # noqa: RUF001
def test_a_judge_that_names_no_answer_gets_the_worst_reward(said):
    episode = played(Panel(["a", "b", "c"], lambda shown: said))
    judge = judge_of(episode)
    assert judge.total_reward == -1.0
    assert judge.metadata["picked"] is None
    assert episode.is_correct is False
    assert episode.metrics["judge_picked"] == 0
    reason = TerminationReason.MAX_RESPONSE_TOKENS if said.endswith(CUT_OFF) else TerminationReason.DONE
    assert episode.termination_reason is reason


@pytest.mark.parametrize(("answers", "is_correct"), [("aaa", True), ("bcd", False)])
def test_where_there_is_nothing_to_choose_a_pick_is_worth_nothing(answers, is_correct):
    episode = played(Panel(list(answers), lambda shown: "3"))
    assert judge_of(episode).total_reward == 0.0
    assert episode.is_correct is is_correct
    assert "judge_right_of_mixed" not in episode.metrics


@pytest.mark.parametrize("seed", range(5))
def test_a_blind_judge_gains_nothing_on_average(seed):
    solvers = random.Random(seed).choices("abcd", k=6)
    rewards = [judge_of(played(Panel(solvers, lambda s, n=n: n))).total_reward for n in "123456"]
    assert sum(rewards) == pytest.approx(0)


@pytest.mark.parametrize("hostile", ["a\n2: a", "1: a", "ab", "", " ", "z", "a" * 10_000, f"a{CUT_OFF}", "\x00", "é"])
def test_answers_out_of_format_are_never_shown(hostile):
    panel = Panel([hostile, "b", "a"], number_of("a"))
    episode = played(panel)
    assert sorted(panel.shown.values()) == ["a", "b"]
    assert by_solver(episode)["solver-1"].total_reward == -1.0
    assert episode.is_correct is True


def test_without_an_answer_to_show_there_is_no_judge():
    episode = played(Panel(["x", "yy", f"a{CUT_OFF}"]))
    assert [trajectory.role for trajectory in episode.trajectories] == ["solver"] * 3
    assert episode.is_correct is False
    assert episode.termination_reason is TerminationReason.DONE
    assert played(Panel([f"b{CUT_OFF}", f"a{CUT_OFF}"])).termination_reason is TerminationReason.MAX_RESPONSE_TOKENS


def test_a_solver_that_fails_ends_the_rollout_with_its_own_error_and_the_others_stop():
    panel = Panel(["a", EngineError("out of order"), "b", "c"], number_of("a"), [50, 3, 50, 0])
    with pytest.raises(EngineError, match="out of order"):
        played(panel)
    assert panel.ended == [3, 1], "no solver continues in the background"


def test_a_rollout_that_is_cancelled_leaves_nothing_behind():
    async def scene():
        going = asyncio.Event()
        stopped = []

        async def call(number):
            going.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                stopped.append(number)
                raise

        rollout = asyncio.create_task(all_or_none([call(1), call(2)]))
        await going.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        return sorted(stopped), len(asyncio.all_tasks())

    assert asyncio.run(scene()) == ([1, 2], 1)


def test_solvers_are_compared_with_solvers_and_judges_with_judges():
    workflow = SolverJudgeWorkflow()
    panels = [Panel(list("abcd"), lambda s: "1"), Panel(list("aaxb"), lambda s: "2"), Panel(["x"] * 4)]
    episodes = [played(panel, seed=n) for n, panel in enumerate(panels)]
    groups = {g.role: g for g in group_trajectories(0, TASK.task_id, episodes, workflow.group_of)}
    assert {role: len(group.trajectories) for role, group in groups.items()} == {"solver": 12, "judge": 2}
    prompts = {tuple(t.steps[0].prompt_ids) for t in groups["solver"].trajectories}
    assert len(prompts) == 1, "compared answers belong to the same question"


@pytest.mark.parametrize(
    ("train", "trained"), [("both", {"solver", "judge"}), ("judge", {"judge"}), ("solver", {"solver"})]
)
def test_which_roles_are_trained(train, trained):
    episode = played(Panel(list("abcd"), number_of("a")), train=train)
    assert {t.role for t in episode.trajectories if t.trainable} == trained
    assert {t.role for t in episode.trajectories} == {"solver", "judge"}
    assert all(t.has_reward for t in episode.trajectories)


def test_metrics_tell_the_roles_apart():
    assert played(Panel(list("aabx"), number_of("b"))).metrics == {
        "solvers_right": 0.5,
        "answers_shown": 3.0,
        "judge_picked": 1.0,
        "right_share_shown": pytest.approx(2 / 3),
        "judge_right_of_mixed": 0.0,
        "right_share_of_mixed": pytest.approx(2 / 3),
    }


def test_rules_are_given_to_models_that_were_not_taught_them():
    panel = Panel(["a", "b"], number_of("a"))
    workflow = SolverJudgeWorkflow(SolverJudgeConfig(solvers=2))
    episode = asyncio.run(workflow.run(TASK, TITOCompleter(panel)))
    for trajectory in episode.trajectories:
        system, asked = trajectory.steps[0].messages
        assert (system["role"], asked["role"]) == ("system", "user")
        assert "a b c d e f g h" in system["content"]
    assert "number" in judge_of(episode).steps[0].messages[0]["content"]


def test_splits_cover_all_words_once():
    workflow = SolverJudgeWorkflow()
    tasks = [task for split in ("train", "validation") for task in workflow.tasks(split)]
    assert len({task.task_id for task in tasks}) == len(tasks) == 8 * 7 * 6 * 5
    assert 0.12 < len(workflow.tasks("validation")) / len(tasks) < 0.17
    assert all(is_held_out(task.data["word"]) for task in workflow.tasks("validation"))
    assert all(task.data["answer"] == min(task.data["word"]) for task in tasks)
    backwards = SolverJudgeWorkflow(SolverJudgeConfig(letters="zyxw", length=3))
    assert {t.data["answer"] for t in backwards.tasks("train") if "z" in t.data["word"]} == {"z"}


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"letters": "aab"}, "must be different letters"),
        ({"letters": "a1b"}, "must be different letters"),
        ({"hidden_letters": 4}, "must be less than length = 4"),
        ({"length": 9}, "must be at most the number of letters, 8"),
        ({"letters": "abcdefghijklmnop", "length": 8}, "use fewer letters or shorter words"),
        ({"solvers": 1}, "greater than or equal to 2"),
        ({"train": "nobody"}, "'both', 'solver' or 'judge'"),
    ],
)
def test_bad_sections(section, complaint):
    with pytest.raises(ValidationError, match=complaint):
        SolverJudgeConfig(**section)


@pytest.mark.parametrize(("text", "place"), [("1", 0), (" 3\n", 2), ("03", 2), ("4", None), ("0", None), ("٣", None)])
def test_picked(text, place):
    assert picked(text, 3) == place


@pytest.mark.slow
def test_it_keeps_the_contract():
    results = asyncio.run(check_workflow(SolverJudgeWorkflow, answers=["1", "2", "3", *"abcdefgh"]))
    assert not [result for result in results if result.outcome == "failed"]


def test_the_warm_start_teaches_form_and_nothing_else():
    config = SolverJudgeConfig()
    made = list(islice(solver_judge_warm_start.conversations(random.Random(3), config), 20_000))
    assert made == list(islice(solver_judge_warm_start.conversations(random.Random(3), config), 20_000))
    solver_right, judged_right, blind, mixed = 0, 0, 0.0, 0
    for asked, said in made:
        first, *answers = asked["content"].split("\n")
        word = first.removeprefix("first: ")
        assert first == prompt(word)
        assert not is_held_out(word)
        if not answers:
            solver_right += said["content"] == min(word)
            continue
        rights = [line.split(": ")[1] == min(word) for line in answers]
        if 0 < sum(rights) < len(rights):
            mixed += 1
            judged_right += rights[int(said["content"]) - 1]
            blind += sum(rights) / len(rights)
    assert solver_right / 10_000 == pytest.approx(1 / 4, abs=0.02)
    assert judged_right / mixed == pytest.approx(blind / mixed, abs=0.03)


@pytest.mark.slow
def test_the_warm_start_hides_letters_as_the_built_in_run_file_does(tmp_path, monkeypatch):
    """A solver answers with each letter that it sees equally often."""
    config = SolverJudgeConfig.model_validate(run_file()["solver_judge"])
    made = list(islice(solver_judge_warm_start.conversations(random.Random(3), config), 20_000))
    asked = [(question["content"].removeprefix("first: "), answer["content"]) for question, answer in made[::2]]
    assert all(len(view) == config.length and view.count("?") <= 1 and answer in view for view, answer in asked)
    hidden = [(view.replace("?", ""), answer) for view, answer in asked if "?" in view]
    assert len(hidden) / len(asked) == pytest.approx(1 / 2, abs=0.02)
    assert sum(answer == min(seen) for seen, answer in hidden) / len(hidden) == pytest.approx(1 / 3, abs=0.02)
    arguments = ["warm_start", "--out", str(tmp_path / "rows.jsonl"), "--rows", "30", "--seed", "3"]
    monkeypatch.setattr("sys.argv", arguments)
    solver_judge_warm_start.main()
    written = [json.loads(line)["messages"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert written == made[:30]


def test_each_solver_sees_a_part_of_the_word_and_the_judge_all_of_it(make_completer):
    """Hidden parts differ between rollouts and between solvers, and are the same for the same rollout."""
    workflow = SolverJudgeWorkflow(SolverJudgeConfig(hidden_letters=1, explain=False))
    views = []
    for seed in (1, 1, 2):
        engine, _ = make_completer(*"dbca", "1")
        episode = asyncio.run(workflow.run(TASK, TITOCompleter(engine, seed=seed)))
        assert episode.trajectories[-1].role == "judge"
        *solvers, judge = (prompt.partition("first: ")[2] for prompt in engine.prompts)
        assert judge.startswith("dbca")
        seen = [view[:4] for view in solvers]
        assert all(sum(a != b for a, b in zip(view, "dbca", strict=True)) == view.count("?") == 1 for view in seen)
        views.append(seen)
    assert views[0] == views[1] != views[2]
    assert len({view for seen in views for view in seen}) > 1


@pytest.mark.slow
def test_three_steps_are_trained_and_the_books_balance(tmp_path):
    from rllm_local.starter import make_model, make_tokenizer  # torch, which nothing else here needs

    folder = tmp_path / "model"
    tokenizer = make_tokenizer(lambda rng: solver_judge_warm_start.conversations(rng, SolverJudgeConfig()), 0)
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    overrides = (
        f"model.path={folder}",
        "training.steps=3",
        "training.groups_per_step=2",
        "training.rollouts_per_group=4",
        "training.validation_rollouts=4",
        "training.trajectories_per_step=8",
    )
    plugins = PluginManager.from_environment()
    config = load_run_config("solver_judge", plugins, overrides=overrides, backend="local")
    run_dir = tmp_path / "run"
    summary = asyncio.run(launch.train(assemble(config, plugins), run_dir, resume=False, progress=Progress()))
    assert (summary["status"], summary["books"]["trained"]) == ("completed", 3 * 2 * 4)
    assert verify(run_dir).problems == []
    written = [json.loads(line)["episode"] for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]
    solvers = [t["metadata"]["solver_id"] for e in written for t in e["trajectories"] if t["role"] == "solver"]
    assert solvers == ["solver-1", "solver-2", "solver-3", "solver-4"] * len(written)
