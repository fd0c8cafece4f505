"""``solver_judge``: several solvers answer concurrently, and a judge picks one of their answers."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rllm_core.engine import Completer, derive_seed
from rllm_core.types import Episode, FinishReason, Step, Task, TerminationReason, Trajectory
from rllm_core.workflow import Split, Workflow, WorkflowConfig

SOLVER, JUDGE = "solver", "judge"
RIGHT, WRONG, INVALID = 1.0, 0.0, -1.0
HIDDEN = "?"
HELD_OUT_ONE_IN = 7
MAX_WORDS = 100_000

_PICK = re.compile(r"[0-9]{1,2}")
_SOLVER_INSTRUCTIONS = "Which letter of the word comes first in the order {letters}? Give only that letter."
_SOME_ARE_HIDDEN = " Letters that you do not see are written as {hidden}; one of them may be the first."
_JUDGE_INSTRUCTIONS = (
    "Below a word are numbered answers to the question which of its letters comes first in the order {letters}. "
    "Give only the number of an answer that is right."
)

ResultT = TypeVar("ResultT")


class SolverJudgeConfig(WorkflowConfig):
    """``[solver_judge]``: the words, the number of solvers and the letters that each of them sees."""

    letters: Annotated[str, Field(min_length=3, description="Alphabet, in order.")] = "abcdefgh"
    length: Annotated[int, Field(ge=2, le=16, description="Number of letters per word, all different.")] = 4
    solvers: Annotated[
        int, Field(ge=2, le=16, description="Number of solvers per rollout. One judge picks among their answers.")
    ] = 4
    hidden_letters: Annotated[
        int,
        Field(
            ge=0,
            description="Number of letters hidden from each solver, drawn for each one. The judge sees the whole word.",
        ),
    ] = 0
    train: Annotated[
        Literal["both", "solver", "judge"],
        Field(description="Roles to train. The other role still runs, is rewarded and is recorded."),
    ] = "both"
    explain: Annotated[
        bool,
        Field(
            description="Explain the rules in a system message. false asks the bare question, for a model that was "
            "taught the format."
        ),
    ] = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.letters)) != len(self.letters) or not all(c.isalpha() for c in self.letters):
            raise ValueError(f"letters = {self.letters!r} must be different letters")
        if self.length > len(self.letters):
            raise ValueError(f"length = {self.length} must be at most the number of letters, {len(self.letters)}")
        if self.hidden_letters >= self.length:
            raise ValueError(
                f"hidden_letters = {self.hidden_letters} must be less than length = {self.length}; hide fewer letters"
            )
        if math.perm(len(self.letters), self.length) > MAX_WORDS:
            raise ValueError(
                f"{len(self.letters)} letters and length {self.length} make more than {MAX_WORDS:,} words; "
                "use fewer letters or shorter words"
            )
        return self


@dataclass(frozen=True)
class Solution:
    """The result of one solver.

    Attributes:
        solver_id: Id of the solver. Everything about it is looked up by this id, never by a list position.
        step: Its only step.
        candidate: Its answer if that is one letter of the word, else None.
        is_right: Whether the candidate is the right letter.
    """

    solver_id: str
    step: Step
    candidate: str | None
    is_right: bool

    @property
    def reward(self) -> float:
        """1 for the right letter, 0 for another letter of the word, -1 for anything else."""
        return INVALID if self.candidate is None else RIGHT if self.is_right else WRONG


class SolverJudgeWorkflow(Workflow):
    """Asks several solvers ``first: dbca``, and a judge to pick one of their numbered answers.

    The solvers of a rollout answer concurrently, each in its own conversation. Answers that are truncated, or are not
    one letter of the word, are not shown to the judge, so no solver can write another line of the judge's prompt. The
    others are shuffled with the rollout's seed, each under its solver's id. If there are none, there is no judge and
    the task is not solved. A failing solver fails the rollout.

    Rewards: a solver gets 1 for the right letter, 0 for another letter of the word and -1 for anything else, whatever
    the judge does. The judge gets 1 if its pick is right, else 0, minus the share of right answers that it was shown:
    its gain over a blind pick. If all answers are right, or all wrong, every pick gets exactly 0. Anything but the
    number of an answer gets -1.

    A judge learns from rollouts in which some answers are right and some are wrong. Solvers that see the whole word are
    soon all right, and leave it nothing to learn from. With ``hidden_letters``, each solver sees a different part of
    the word. Even the best solvers then disagree, and only the judge can tell who is right, so both roles learn.

    Groups: all solvers of a task's rollouts are compared with each other, and so are its judges, one per rollout. The
    judges' prompts differ by the answers they show. Subtracting the share of right answers corrects for that: a judge
    gains nothing from a rollout in which most answers were right.

    ``is_correct`` of an episode is whether the picked answer is right. About one word in seven is held out, by a hash.
    """

    name: ClassVar[str] = "solver_judge"
    config_model: ClassVar[type[WorkflowConfig]] = SolverJudgeConfig
    config: SolverJudgeConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._tasks: dict[Split, list[Task]] = {"train": [], "validation": []}
        for letters in itertools.permutations(self.config.letters, self.config.length):
            word = "".join(letters)
            answer = min(word, key=self.config.letters.index)
            task = Task(task_id=f"first-{word}", data={"word": word, "answer": answer})
            self._tasks["validation" if is_held_out(word) else "train"].append(task)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns all words of a split, in alphabetical order."""
        return self._tasks[split]

    def group_of(self, episode: Episode, trajectory: Trajectory) -> str:
        """Compares the solvers of a task with each other, and its judges with each other."""
        return trajectory.role

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Runs all solvers concurrently, then the judge."""
        draw = random.Random(derive_seed(completer.seed, "hidden"))
        views = {f"solver-{number}": self._view(task, draw) for number in range(1, self.config.solvers + 1)}
        solutions = dict(
            await all_or_none(
                [self._solve(task, solver_id, view, completer.fork()) for solver_id, view in views.items()]
            )
        )
        shown = [solver_id for solver_id, solution in solutions.items() if solution.candidate is not None]
        random.Random(derive_seed(completer.seed, "shuffle")).shuffle(shown)
        trajectories = [
            Trajectory(
                role=SOLVER,
                steps=[solution.step],
                reward=solution.reward,
                trainable=self.config.train != JUDGE,
                metadata={"solver_id": solution.solver_id},
            )
            for solution in solutions.values()
        ]
        right_share = sum(solutions[solver_id].is_right for solver_id in shown) / len(shown) if shown else 0.0
        metrics = {
            "solvers_right": sum(solution.is_right for solution in solutions.values()) / len(solutions),
            "answers_shown": float(len(shown)),
        }
        if not shown:
            cut_off = all(solution.step.finish_reason is FinishReason.LENGTH for solution in solutions.values())
            return self._ended(task, trajectories, metrics, is_correct=False, is_cut_off=cut_off)
        word = task.data["word"]
        step = await completer.complete(self._asked_judge(word, [str(solutions[s].candidate) for s in shown]))
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        place = None if is_cut_off else picked(step.text, len(shown))
        choice = solutions[shown[place]] if place is not None else None
        is_right = choice is not None and choice.is_right
        metrics |= {"judge_picked": float(choice is not None), "right_share_shown": right_share}
        if 0 < right_share < 1:  # an average over episodes then covers those in which the judge had a choice
            metrics |= {"judge_right_of_mixed": float(is_right), "right_share_of_mixed": right_share}
        trajectories.append(
            Trajectory(
                role=JUDGE,
                steps=[step],
                reward=INVALID if choice is None else is_right - right_share,
                trainable=self.config.train != SOLVER,
                metadata={"shown": shown, "picked": None if choice is None else choice.solver_id},
            )
        )
        return self._ended(task, trajectories, metrics, is_correct=is_right, is_cut_off=is_cut_off)

    def _view(self, task: Task, draw: random.Random) -> str:
        """Returns the word as one solver sees it."""
        word = task.data["word"]
        hidden = draw.sample(range(len(word)), self.config.hidden_letters)
        return "".join(HIDDEN if position in hidden else letter for position, letter in enumerate(word))

    async def _solve(self, task: Task, solver_id: str, view: str, completer: Completer) -> tuple[str, Solution]:
        word = task.data["word"]
        instructions = _SOLVER_INSTRUCTIONS + (_SOME_ARE_HIDDEN if self.config.hidden_letters else "")
        step = await completer.complete(self._asked(instructions, prompt(view)))
        given = step.text.strip()
        if step.finish_reason is FinishReason.LENGTH or len(given) != 1 or given not in word:
            return solver_id, Solution(solver_id, step, candidate=None, is_right=False)
        return solver_id, Solution(solver_id, step, given, is_right=given == task.data["answer"])

    def _asked_judge(self, word: str, candidates: Sequence[str]) -> list[Mapping[str, str]]:
        return self._asked(_JUDGE_INSTRUCTIONS, judge_prompt(word, candidates))

    def _asked(self, instructions: str, question: str) -> list[Mapping[str, str]]:
        asked = [{"role": "user", "content": question}]
        if not self.config.explain:
            return [*asked]
        return [
            {"role": "system", "content": instructions.format(letters=" ".join(self.config.letters), hidden=HIDDEN)},
            *asked,
        ]

    @staticmethod
    def _ended(
        task: Task,
        trajectories: list[Trajectory],
        metrics: dict[str, float],
        *,
        is_correct: bool,
        is_cut_off: bool,
    ) -> Episode:
        return Episode(
            task_id=task.task_id,
            trajectories=trajectories,
            is_correct=is_correct,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE,
            metrics=metrics,
        )


async def all_or_none(calls: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Returns the results of concurrent calls, in call order; the first failure cancels the others and is raised.

    A task group would raise an exception group, in which the core cannot recognize a timeout or an engine error.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_held_out(word: str) -> bool:
    """Whether a word belongs to the validation split: about one in seven, by a hash."""
    digest = blake2b(f"first:{word}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def prompt(word: str) -> str:
    """Returns the question for a solver."""
    return f"first: {word}"


def judge_prompt(word: str, candidates: Sequence[str]) -> str:
    """Returns the question for the judge: the whole word, then one answer per line, numbered from 1."""
    return "\n".join([prompt(word), *(f"{number}: {given}" for number, given in enumerate(candidates, 1))])


def picked(text: str, candidates: int) -> int | None:
    """Returns the index of the candidate that an answer names, or None if it names none."""
    number = text.strip()
    place = int(number) - 1 if _PICK.fullmatch(number) else -1
    return place if 0 <= place < candidates else None


def run_file() -> dict[str, Any]:
    """Returns settings that train both roles on backend ``local``, with a model that was taught the format.

    `rllm_workflows.solver_judge_warm_start` writes the conversations that teach the format. Solvers learn several times
    as fast as judges, so their advantages get a small weight.
    """
    return {
        "training": {"steps": 250, "groups_per_step": 16, "rollouts_per_group": 8},
        "rollout": {"max_response_tokens": 6},
        "algorithm": {
            "name": "grpo",
            "entropy_coefficient": 0.002,
            "roles": {SOLVER: {"name": "grpo", "weight": 0.01}},
        },
        "optimizer": {
            "learning_rate": 1e-3,
            "schedule": "linear",
            "warmup_steps": 5,
            "final_learning_rate_fraction": 0.1,
        },
        "solver_judge": {"explain": False, "hidden_letters": 1},
    }
