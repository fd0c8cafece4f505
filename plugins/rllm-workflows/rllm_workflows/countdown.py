"""``countdown``: reach a target with the given numbers and ``+ - * /``, using each number exactly once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rllm_core.engine import Completer, derive_seed
from rllm_core.errors import ConfigError
from rllm_core.text import counted
from rllm_core.types import Episode, FinishReason, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig
from rllm_workflows import arithmetic
from rllm_workflows.presets import INSTRUCTION_TUNED

HELD_OUT_ONE_IN = 7
MAX_NUMBER = 10**12
REACHED, RIGHT_NUMBERS, WRONG = 1.0, 0.1, 0.0

_OPEN, _CLOSE = "<answer>", "</answer>"


class CountdownConfig(WorkflowConfig):
    """``[countdown]``: the source of the tasks. Without files they are generated, identically on every machine."""

    train_file: Annotated[
        Path | None,
        Field(
            description="JSONL file with question, target, nums and ground_truth per line. "
            "If unset, tasks are generated."
        ),
    ] = None
    validation_file: Annotated[
        Path | None,
        Field(description="Like train_file. If unset, about one in seven rows of train_file are held out."),
    ] = None
    numbers: Annotated[int, Field(ge=2, le=6, description="Numbers per generated task.")] = 3
    largest: Annotated[int, Field(ge=2, le=10_000, description="Largest generated number. The smallest is 1.")] = 50
    largest_target: Annotated[int, Field(ge=1, description="Largest generated target. The smallest is 1.")] = 200
    train_tasks: Annotated[int, Field(ge=1, le=100_000, description="Number of training tasks to generate.")] = 4096
    validation_tasks: Annotated[int, Field(ge=1, le=100_000, description="Number of validation tasks to generate.")] = (
        512
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.validation_file is not None and self.train_file is None:
            raise ValueError("validation_file needs train_file: generated training tasks could overlap with it")
        return self


class Row(BaseModel):
    """A task.

    Attributes:
        question: Question to the model.
        target: Value to reach.
        nums: Numbers to use, each exactly once.
        ground_truth: A solution, or what the dataset stores instead. Recorded, but never used for the reward.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    question: Annotated[str, Field(min_length=1)]
    target: Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
    nums: Annotated[list[Annotated[int, Field(ge=0, le=MAX_NUMBER)]], Field(min_length=1, max_length=12)]
    ground_truth: Any

    @property
    def identity(self) -> tuple[int, tuple[int, ...]]:
        """Key that is equal for equal tasks, ignoring the order of the numbers."""
        return self.target, tuple(sorted(self.nums))

    @property
    def task_id(self) -> str:
        """Id of the task, identical on every machine."""
        target, nums = self.identity
        return f"countdown-{target}-{'-'.join(map(str, nums))}"

    @property
    def is_held_out(self) -> bool:
        """Whether the task is held out when one source serves both splits; true for about one in seven."""
        digest = blake2b(repr(self.identity).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


class CountdownWorkflow(Workflow):
    """Single-turn task: the answer is an expression, in the last ``<answer>...</answer>`` or alone.

    The reward is 1 if the expression reaches the target and uses every number exactly once, 0.1 if it uses the right
    numbers but has another value, and 0 otherwise. `rllm_workflows.arithmetic` evaluates expressions without executing
    them.

    The splits never share a target with the same numbers. Generated tasks and the rows of a single file are split by
    hash; two files must not share a task.
    """

    name: ClassVar[str] = "countdown"
    config_model: ClassVar[type[WorkflowConfig]] = CountdownConfig
    config: CountdownConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._tasks: dict[Split, list[Task]] | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns the tasks of a split, in file order or in the order they were generated."""
        if self._tasks is None:
            train, validation = self.config.train_file, self.config.validation_file
            rows = _made_up(self.config) if train is None else _from_files(train, validation)
            self._tasks = {
                name: [Task(task_id=row.task_id, data=row.model_dump()) for row in rows[name]] for name in rows
            }
        return self._tasks[split]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks the question and scores the answer."""
        step = await completer.complete([{"role": "user", "content": task.data["question"]}])
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        reward = score(step.text, target=task.data["target"], nums=task.data["nums"])
        return self.episode(
            task,
            [step],
            reward=reward,
            is_correct=reward == REACHED,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE,
        )


def score(text: str, *, target: int, nums: Sequence[int]) -> float:
    """Returns the reward of an answer."""
    answer = extract_answer(text)
    if answer is None:
        return WRONG
    try:
        expression = arithmetic.parse(answer)
    except arithmetic.ExpressionError:
        return WRONG
    if sorted(expression.numbers) != sorted(nums):
        return WRONG
    try:
        return REACHED if expression.value() == target else RIGHT_NUMBERS
    except ZeroDivisionError:
        return WRONG


def extract_answer(text: str) -> str | None:
    """Returns the last complete ``<answer>...</answer>``, the whole text without such a tag, or None if none closes."""
    if _OPEN not in text:
        return text
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


def question(nums: Sequence[int], target: int) -> str:
    """Returns the question of a generated task."""
    return (
        f"Reach {target} with the numbers {', '.join(map(str, nums))}. Use + - * / and parentheses, and every number "
        "exactly once. Give only the expression, in <answer> </answer>, for example <answer>(1 + 2) / 3</answer>."
    )


def _made_up(config: CountdownConfig) -> dict[Split, list[Row]]:
    wanted: dict[Split, int] = {"train": config.train_tasks, "validation": config.validation_tasks}
    rows: dict[Split, list[Row]] = {"train": [], "validation": []}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    generator = random.Random(derive_seed("countdown", config.numbers, config.largest, config.largest_target))
    without_new = 0
    while any(len(rows[split]) < wanted[split] for split in rows):
        row = _make_up(generator, config)
        split: Split = "validation" if row is not None and row.is_held_out else "train"
        if row is None or row.identity in seen or len(rows[split]) == wanted[split]:
            without_new += 1
            if without_new > 100_000:
                raise ConfigError(
                    f"countdown: {config.numbers} numbers up to {config.largest} with targets up to "
                    f"{config.largest_target} do not yield {config.train_tasks} training and {config.validation_tasks} "
                    "validation tasks; request fewer tasks or widen the ranges"
                )
            continue
        without_new = 0
        seen.add(row.identity)
        rows[split].append(row)
    return rows


def _make_up(generator: random.Random, config: CountdownConfig) -> Row | None:
    """Returns a task from a random expression, or None if its value cannot be a target."""
    nums = [generator.randint(1, config.largest) for _ in range(config.numbers)]
    parts = [(str(number), number) for number in nums]
    while len(parts) > 1:
        (left, left_value), (right, right_value) = (parts.pop(generator.randrange(len(parts))) for _ in range(2))
        match sign := generator.choice("+-*/"):
            case "+":
                value = left_value + right_value
            case "-":
                value = left_value - right_value
            case "*":
                value = left_value * right_value
            case _:
                if right_value == 0 or left_value % right_value:
                    return None
                value = left_value // right_value
        parts.append((f"({left} {sign} {right})" if parts else f"{left} {sign} {right}", value))
    solution, target = parts[0]
    if not 1 <= target <= config.largest_target:
        return None
    return Row(question=question(nums, target), target=target, nums=nums, ground_truth=solution)


def _from_files(train_file: Path, validation_file: Path | None) -> dict[Split, list[Row]]:
    train = dict(_read(train_file))
    if validation_file is None:
        held_out = [row for row in train.values() if row.is_held_out]
        kept = [row for row in train.values() if not row.is_held_out]
        if not held_out or not kept:
            raise ConfigError(
                f"{train_file}: {counted(len(train), 'row')}, too few to hold some out; set countdown.validation_file"
            )
        return {"train": kept, "validation": held_out}
    validation = dict(_read(validation_file))
    lines = {row.identity: line for line, row in train.items()}
    for line, row in validation.items():
        if row.identity in lines:
            raise ConfigError(
                f"{validation_file}:{line}: the task is also in {train_file}:{lines[row.identity]}; "
                "training and validation must not overlap"
            )
    return {"train": list(train.values()), "validation": list(validation.values())}


def _read(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields line numbers and rows of a JSONL file; a repeated task is an error."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data file {path} cannot be read: {error}") from error
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _row(line, f"{path}:{number}")
        if row.identity in seen:
            raise ConfigError(f"{path}:{number}: same task as line {seen[row.identity]}")
        seen[row.identity] = number
        yield number, row
    if not seen:
        raise ConfigError(f"data file {path} has no rows")


def _row(line: str, where: str) -> Row:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ConfigError(
                f"{where}: the row has no field {field!r}; it needs {', '.join(Row.model_fields)}"
            ) from None
        if not field:
            raise ConfigError(f"{where}: not a JSON object: {first['msg']}") from None
        raise ConfigError(f"{where}: field {field!r}: {first['msg']}, got {first['input']!r}") from None


def run_file() -> dict[str, Any]:
    """Returns settings for a small instruction-tuned model; the starter model is too small for this task."""
    return INSTRUCTION_TUNED
