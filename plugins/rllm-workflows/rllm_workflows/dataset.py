"""``dataset``: questions and answers from rows, with a reward function selected by name."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, overload

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.run_file import Preset
from rllm_core.sandbox import ChildError, Limits
from rllm_core.services import RewardFunction
from rllm_core.text import counted, printable
from rllm_core.types import Episode, FinishReason, Step, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig
from rllm_workflows.dataset_examples import Columns, Examples, check_no_overlap
from rllm_workflows.dataset_rows import DatasetRows, open_file, open_hub, open_saved
from rllm_workflows.presets import INSTRUCTION_TUNED
from rllm_workflows.reward_check import complaint

logger = logging.getLogger(__name__)

ANSWERS_OF_OTHER_ROWS = "answers_of_other_rows"
"""Metric: share of answers that are wrong, but expected in another row; high if answers are in the wrong rows."""

ASKED_ROWS = 8  # number of rows, among which two different answers should occur


class DatasetConfig(WorkflowConfig):
    """``[dataset]``: source, columns and reward function. Set exactly one source."""

    train_file: Annotated[str, Field(description="Training rows: a .jsonl or .parquet file.")] = ""
    validation_file: Annotated[
        str, Field(description="File of validation rows. If unset, held_out_share of the training rows is held out.")
    ] = ""
    saved: Annotated[str, Field(description="Folder written by save_to_disk of Hugging Face datasets.")] = ""
    hub_dataset: Annotated[str, Field(description="Hugging Face dataset ID.")] = ""
    hub_subset: Annotated[str, Field(description="Configuration of hub_dataset. Defaults to its only one.")] = ""
    hub_revision: Annotated[str, Field(description="Commit or tag of hub_dataset. Defaults to the latest.")] = ""
    allow_download: Annotated[bool, Field(description="Allow network access, which hub_dataset requires.")] = False
    train_split: Annotated[
        str, Field(min_length=1, description="Training split; applies to saved and hub_dataset.")
    ] = "train"
    validation_split: Annotated[
        str,
        Field(
            description="Validation split; applies to saved and hub_dataset. If unset, held_out_share of the "
            "training rows is held out."
        ),
    ] = ""
    held_out_share: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            allow_inf_nan=False,
            description="Share of training rows to hold out, by a hash of the question, if no validation rows are set.",
        ),
    ] = 0.1
    question: Annotated[str, Field(min_length=1, description="Column with the question.")] = "question"
    answer: Annotated[
        str,
        Field(
            min_length=1,
            description="Column with the correct answer: text, a number, or a list of texts of which any is correct.",
        ),
    ] = "answer"
    system: Annotated[str, Field(description="Column with a system message. If unset, there is none.")] = ""
    tools: Annotated[
        str, Field(description="Column with the tools the model may call, as JSON. If unset, there are none.")
    ] = ""
    id: Annotated[str, Field(description="Column with unique row ids. Defaults to a hash of the row.")] = ""
    reward: Annotated[str, Field(min_length=1, description="Name of the reward function.")] = "exact_match"
    reward_columns: Annotated[
        tuple[str, ...], Field(description="Additional columns for the reward function, as task.data['row'].")
    ] = ()
    reward_timeout_seconds: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Timeout of one reward call, in seconds.")
    ] = 10.0
    solved_at: Annotated[
        float, Field(allow_inf_nan=False, description="Minimum reward at which a task counts as solved.")
    ] = 1.0


class DatasetWorkflow(Workflow):
    """Single-turn workflow over the rows of a dataset; the reward function decides the range of rewards.

    Every row is checked when the workflow is created, before anything is allocated, and is read again for its rollouts.
    The reward function runs in a child process with a timeout. If it fails, the rollout fails and gets no reward.
    """

    name: ClassVar[str] = "dataset"
    config_model: ClassVar[type[WorkflowConfig]] = DatasetConfig
    config: DatasetConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._examples, self._tasks = _splits(self.config)

    def tasks(self, split: Split) -> Sequence[Task]:
        """See `Workflow.tasks`; each task is created on access.

        Raises:
            rllm_core.errors.PluginError: If the reward function does not exist.
        """
        _ = self._reward  # Look it up now, so that a wrong name fails before anything is allocated.
        return self._tasks[split]

    async def open(self) -> None:
        """Rewards an empty text for the first task, so that a function that cannot read the rows fails early.

        Warns if the function does not prefer the first row's answer to that of another row.

        Raises:
            ConfigError: If the function fails.
        """
        try:
            await self._reward(self._tasks["train"][0], "")
        except (ChildError, ValueError) as error:
            raise ConfigError(
                f"dataset.reward = {self.config.reward!r} fails on the first row with an empty text: {error}"
            ) from error
        tasks = self._tasks["train"][:ASKED_ROWS]
        if (wrong := await complaint(self._reward, tasks)) is not None:
            logger.warning("dataset.reward = %r %s", self.config.reward, printable(wrong))

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks the question and rewards the answer."""
        messages = [{"role": "user", "content": task.data["question"]}]
        if "system" in task.data:
            messages.insert(0, {"role": "system", "content": task.data["system"]})
        step = await completer.complete(messages, tools=task.data.get("tools"))
        answer = graded_text(step)
        reward = await self._reward(task, answer)
        is_correct = reward >= self.config.solved_at
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        return self.episode(
            task,
            [step],
            reward=reward,
            is_correct=is_correct,
            metrics={
                ANSWERS_OF_OTHER_ROWS: float(not is_correct and self._examples.has_answer(answer)),
                **reward.numbers,
            },
            metadata={"reward_parts": reward.parts} if reward.parts else None,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE,
        )

    @cached_property
    def _reward(self) -> RewardFunction:
        limits = Limits(wall_seconds=self.config.reward_timeout_seconds)
        return self.services.reward_function(self.config.reward, limits)


def graded_text(step: Step) -> str:
    """Returns the text for the reward function: the answer's text and one line of JSON per tool call."""
    calls = [call["function"] for call in step.response.get("tool_calls", ())]
    lines = [json.dumps({"name": call["name"], "arguments": json.loads(call["arguments"])}) for call in calls]
    return "\n".join([step.text, *lines] if step.text or not lines else lines)


class _Tasks(Sequence[Task]):
    """One task per chosen row."""

    def __init__(self, examples: Examples, chosen: Sequence[int]) -> None:
        self._examples = examples
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        example = self._examples[self._chosen[index]]
        return Task(task_id=example.task_id, data=example.data)


def _splits(config: DatasetConfig) -> tuple[Examples, dict[Split, Sequence[Task]]]:
    """Returns the training rows, and the tasks of both splits.

    Raises:
        ConfigError: If the source or a row is invalid.
    """
    columns = Columns(
        question=config.question,
        answer=config.answer,
        system=config.system,
        tools=config.tools,
        id=config.id,
        kept=config.reward_columns,
    )
    train_rows, validation_rows = _sources(config, columns.wanted)
    train = Examples(train_rows, columns, config.reward)
    if validation_rows is not None:
        validation = Examples(validation_rows, columns, config.reward)
        check_no_overlap(train, validation)
        return train, {
            "train": _Tasks(train, range(len(train))),
            "validation": _Tasks(validation, range(len(validation))),
        }
    held_out = train.held_out(config.held_out_share)
    if config.held_out_share > 0 and len(np.unique(held_out)) < 2:
        raise ConfigError(
            f"{train_rows.source}: {counted(len(train), 'row')}, too few different questions to hold "
            f"{config.held_out_share:g} of them out; set other rows for validation, or dataset.held_out_share = 0"
        )
    return train, {"train": _Tasks(train, _where(~held_out)), "validation": _Tasks(train, _where(held_out))}


def _where(mask: npt.NDArray[np.bool_]) -> Sequence[int]:
    """Returns the indices at which ``mask`` is true, eight bytes each."""
    return array("Q", np.flatnonzero(mask).astype(np.uint64).tobytes())


def _sources(config: DatasetConfig, columns: Sequence[str]) -> tuple[DatasetRows, DatasetRows | None]:
    """Returns the training rows, and the validation rows if they have a source of their own."""
    named = [key for key in ("train_file", "saved", "hub_dataset") if getattr(config, key)]
    if len(named) != 1:
        which = f"set only one of {' and '.join(named)}" if named else "none is set"
        raise ConfigError(f"dataset needs exactly one of train_file, saved and hub_dataset: {which}")
    for key, owners in _BELONGS_TO.items():
        if getattr(config, key) != DatasetConfig.model_fields[key].default and named[0] not in owners:
            raise ConfigError(f"dataset.{key} applies to {' or '.join(owners)}, not to {named[0]}")
    if config.train_file:
        train = open_file(Path(config.train_file).expanduser(), columns)
        held_out = config.validation_file
        return train, open_file(Path(held_out).expanduser(), columns) if held_out else None
    if config.saved:
        folder, split = Path(config.saved).expanduser(), config.validation_split
        train, splits = open_saved(folder, config.train_split, columns)
        if split and not splits:
            raise ConfigError(f"{folder} has no splits; unset dataset.validation_split to hold rows out")
        if config.train_split != DatasetConfig.model_fields["train_split"].default and not splits:
            raise ConfigError(f"{folder} has no splits; unset dataset.train_split to train on its rows")
        return train, open_saved(folder, split, columns)[0] if split else None
    if not config.allow_download:
        raise ConfigError(
            f"dataset.hub_dataset = {config.hub_dataset!r} needs the network: set dataset.allow_download = true, or "
            "save the dataset with save_to_disk and set dataset.saved to the folder"
        )
    splits = [config.train_split, *([config.validation_split] if config.validation_split else [])]
    opened = [open_hub(config.hub_dataset, config.hub_subset, config.hub_revision, s, columns) for s in splits]
    return opened[0], opened[1] if len(opened) > 1 else None


_BELONGS_TO = {
    "validation_file": ("train_file",),
    "train_split": ("saved", "hub_dataset"),
    "validation_split": ("saved", "hub_dataset"),
    "hub_subset": ("hub_dataset",),
    "hub_revision": ("hub_dataset",),
    "allow_download": ("hub_dataset",),
}


def run_file(given: Mapping[str, Any]) -> Preset:
    """Returns settings for the user's model: the starter model, which is small and learns fast, or another."""
    model = given.get("model")
    if isinstance(model, Mapping) and model.get("path"):
        return Preset(INSTRUCTION_TUNED, "settings for a small instruction-tuned model")
    tables = {**INSTRUCTION_TUNED, "optimizer": {**INSTRUCTION_TUNED["optimizer"], "learning_rate": 1e-3}}
    return Preset(
        tables, "settings for the starter model, since model.path is not set: optimizer.learning_rate = 0.001"
    )
