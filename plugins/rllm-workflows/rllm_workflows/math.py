r"""``math``: problems with a final answer, from files or generated. Answers are compared by value."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.sandbox import ChildFunction, ChildOutOfMemory, ChildTimeout, Limits
from rllm_core.text import counted
from rllm_core.types import Episode, FinishReason, Messages, Task, TerminationReason, well_formed
from rllm_core.workflow import Split, Workflow, WorkflowConfig
from rllm_workflows.math_answers import extract, is_plain, stated
from rllm_workflows.math_expressions import MAX_CHARACTERS

HELD_OUT_ONE_IN = 5
CHECK, SYMBOLIC_CHECK = "rllm_workflows.math_answers:same", "rllm_workflows.math_symbolic:same"
CHECKS_AT_ONCE = 8
CHECK_MEMORY_BYTES = 2 << 30

ASK_FOR_BOX = r"Think step by step, and put the final answer in \boxed{}."


class MathConfig(WorkflowConfig):
    """``[math]``: the source of the problems, and how answers are compared."""

    train_file: Annotated[
        Path | None,
        Field(description="JSONL file with a problem and its answer per line. If unset, problems are generated."),
    ] = None
    validation_file: Annotated[
        Path | None,
        Field(description="Like train_file. If unset, about one in five training rows are held out."),
    ] = None
    problem_field: Annotated[str, Field(min_length=1, description="Name of the field with the problem.")] = "problem"
    answer_field: Annotated[
        str,
        Field(
            min_length=1,
            description="Name of the field with the answer, alone or at the end of a solution (as in GSM8K).",
        ),
    ] = "answer"
    instructions: Annotated[
        str | None,
        Field(
            description="System message. If unset, problems from a file get a request for a boxed answer, and "
            "generated problems get none."
        ),
    ] = None
    symbolic: Annotated[
        bool, Field(description="Use math-verify for answers the built-in rules cannot read. Needs the extra [math].")
    ] = False
    check_timeout_seconds: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Timeout of one comparison, in seconds. On timeout, the answer is wrong.",
        ),
    ] = 5.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.validation_file is not None and self.train_file is None:
            raise ValueError("validation_file needs train_file: generated training problems could overlap with it")
        return self


class MathWorkflow(Workflow):
    r"""Single-turn task: the answer is the last ``\boxed{...}``, the text after ``####``, or the last number.

    The reward is 1 if the answer equals the row's (see `rllm_workflows.math_answers`), else 0. A truncated completion
    has no answer. Answers are never executed. Child processes compare them under time and memory limits: an answer
    that exceeds a limit is wrong and counts in ``grader_timeouts``. If a comparison crashes, the rollout fails.

    Generated problems subtract the hundreds from a three-digit number without zeros: ``473-400?`` is 73.
    """

    name: ClassVar[str] = "math"
    config_model: ClassVar[type[WorkflowConfig]] = MathConfig
    config: MathConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        if self.config.symbolic and importlib.util.find_spec("math_verify") is None:
            raise ConfigError("math.symbolic needs math-verify: pip install 'rllm-workflows[math]'")
        instructions = self.config.instructions
        if instructions is None:
            instructions = ASK_FOR_BOX if self.config.train_file is not None else ""
        self._system = [{"role": "system", "content": instructions}] if instructions else []
        self._tasks = _made_up() if self.config.train_file is None else _from_files(self.config)
        self._children: ChildFunction | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns the problems of a split, in file order or in the order they were generated."""
        return self._tasks[split]

    async def close(self) -> None:
        """Stops the child processes that compare answers."""
        if self._children is not None:
            self._children.close()
            self._children = None

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks the question and scores the answer."""
        step = await completer.complete(Messages([*self._system, {"role": "user", "content": task.data["problem"]}]))
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        answer = None if is_cut_off else extract(step.text)
        is_correct, timed_out = False, False
        if answer:
            try:
                is_correct = await self._is_same(answer, task.data["answer"])
            except (ChildTimeout, ChildOutOfMemory):
                timed_out = True
        return self.episode(
            task,
            [step],
            reward=float(is_correct),
            is_correct=is_correct,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE,
            metrics={"answered": float(bool(answer)), "grader_timeouts": float(timed_out)},
        )

    async def _is_same(self, given: str, wanted: str) -> bool:
        if is_plain(given) and is_plain(wanted):
            return given == wanted
        if self._children is None:
            limits = Limits(wall_seconds=self.config.check_timeout_seconds, memory_bytes=CHECK_MEMORY_BYTES)
            self._children = ChildFunction(
                SYMBOLIC_CHECK if self.config.symbolic else CHECK, limits, children=CHECKS_AT_ONCE
            )
        return bool(await self._children(given, wanted))


def _made_up() -> dict[Split, list[Task]]:
    tasks: dict[Split, list[Task]] = {"train": [], "validation": []}
    for digits in itertools.product("123456789", repeat=3):
        problem = f"{''.join(digits)}-{digits[0]}00?"
        task = Task(task_id=f"math-{problem}", data={"problem": problem, "answer": "".join(digits[1:])})
        tasks["validation" if _is_held_out(problem) else "train"].append(task)
    return tasks


def _is_held_out(problem: str) -> bool:
    """Returns whether a problem is held out when one source serves both splits; true for about one in five."""
    digest = blake2b(f"math:{problem}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def _from_files(config: MathConfig) -> dict[Split, list[Task]]:
    assert config.train_file is not None
    train = dict(_read(config.train_file, config))
    if config.validation_file is None:
        held_out = [task for task in train.values() if _is_held_out(task.data["problem"])]
        kept = [task for task in train.values() if not _is_held_out(task.data["problem"])]
        if not held_out or not kept:
            raise ConfigError(
                f"{config.train_file}: {counted(len(train), 'row')}, too few to hold some out; set math.validation_file"
            )
        return {"train": kept, "validation": held_out}
    lines = {task.task_id: line for line, task in train.items()}
    validation = dict(_read(config.validation_file, config))
    for line, task in validation.items():
        if task.task_id in lines:
            raise ConfigError(
                f"{config.validation_file}:{line}: the problem is also in {config.train_file}:{lines[task.task_id]}; "
                "training and validation must not overlap"
            )
    return {"train": list(train.values()), "validation": list(validation.values())}


def _read(path: Path, config: MathConfig) -> Iterator[tuple[int, Task]]:
    """Yields line numbers and tasks of a JSONL file; a repeated problem is an error."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data file {path} cannot be read: {error}") from error
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        task = _task(line, f"{path}:{number}", config)
        if task.task_id in seen:
            raise ConfigError(f"{path}:{number}: same problem as line {seen[task.task_id]}")
        seen[task.task_id] = number
        yield number, task
    if not seen:
        raise ConfigError(f"data file {path} has no rows")


def _task(line: str, where: str, config: MathConfig) -> Task:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a JSON object")
    problem = _field(row, config.problem_field, where)
    answer = stated(_field(row, config.answer_field, where))
    if not 0 < len(answer) <= MAX_CHARACTERS:
        raise ConfigError(
            f"{where}: field {config.answer_field!r}: an answer must have 1 to {MAX_CHARACTERS} characters, "
            f"got {len(answer)}"
        )
    digest = blake2b(problem.encode(), digest_size=12).hexdigest()
    return Task(task_id=f"math-{digest}", data={"problem": problem, "answer": answer})


def _field(row: dict[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise ConfigError(f"{where}: the row has no field {name!r}; it has {', '.join(map(str, row))}")
    value = row[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or value != well_formed(value):
        raise ConfigError(f"{where}: field {name!r} must be well-formed text, got {value!a:.80}")
    return value


def run_file() -> dict[str, Any]:
    """Returns settings for backend ``local``; every tried seed learned generated problems. Others need more tokens."""
    return {
        "training": {"steps": 150, "groups_per_step": 16, "rollouts_per_group": 16},
        "rollout": {"max_response_tokens": 4},
        "algorithm": {"name": "grpo", "entropy_coefficient": 0.005, "entropy_coefficient_final": 0.0},
        "optimizer": {
            "learning_rate": 2e-3,
            "schedule": "linear",
            "warmup_steps": 5,
            "final_learning_rate_fraction": 0.05,
        },
    }
