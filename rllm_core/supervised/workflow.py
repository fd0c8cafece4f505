"""Workflow ``sft``: the rows of a data set are its tasks, and what was written in them is what is learnt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, overload

import numpy as np
from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, MaskedTokens
from rllm_core.parser.contract import MaskMethod
from rllm_core.supervised.rows import Conversation, Rows, open_rows
from rllm_core.tokens import repeated
from rllm_core.types import Episode, Step, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig


class SFTConfig(WorkflowConfig):
    """``[sft]``: which conversations are learnt, and how they become tokens."""

    train: Annotated[str, Field(min_length=1, description="File of conversations, .jsonl or .parquet.")]
    validation: Annotated[str, Field(description="File of held-out conversations; unset is no validation.")] = ""
    method: Annotated[
        MaskMethod,
        Field(
            description="cumulative: one sequence per conversation, as a rollout leaves it. stepwise: one sequence per "
            "answer, after everything before it as the template writes that. hf_template: masked by the chat "
            "template's own {% generation %}."
        ),
    ] = "cumulative"
    max_tokens: Annotated[
        int | None, Field(ge=1, description="Longest sequence that is trained; unset is what the model can take.")
    ] = None
    too_long: Annotated[
        Literal["error", "skip"],
        Field(description="What a row beyond that does: end the run, or be left out and counted as filtered."),
    ] = "error"


class _RowTasks(Sequence[Task]):
    """A task per row, made when it is asked for."""

    def __init__(self, rows: Rows, split: Split) -> None:
        self.rows = rows
        self.split = split

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        task_id = f"{self.rows.path.name}:{self.rows.number(index)}"
        return Task(task_id=task_id, data={"split": self.split, "row": index})


class SFTWorkflow(Workflow):
    """Plays a row without asking the model: its steps hold the tokens of the parser's ``tokenize_and_mask``.

    There is no reward. A row's ``weight`` is the advantage of its tokens.
    """

    name: ClassVar[str] = "sft"
    config_model: ClassVar[type[WorkflowConfig]] = SFTConfig
    samples: ClassVar[bool] = False
    config: SFTConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._opened: dict[Split, Rows] = {}

    def tasks(self, split: Split) -> Sequence[Task]:
        """See `Workflow.tasks`; every row of the file is checked once, and none is kept."""
        path = self.config.train if split == "train" else self.config.validation
        if not path:
            return []
        if split not in self._opened:
            try:
                self._opened[split] = open_rows(Path(path))
            except ConfigError as error:
                raise ConfigError(f"sft.{split}: {error}") from error
        return _RowTasks(self._opened[split], split)

    async def run(self, task: Task, completer: Completer) -> Episode:
        """The row's tokens as steps that nobody sampled."""
        engine = completer.engine
        if engine.parser is None:
            raise ConfigError(f"workflow 'sft' needs a parser, and engine {engine.name!r} has none")
        rows, index = self._opened[task.data["split"]], task.data["row"]
        limits = [limit for limit in (self.config.max_tokens, engine.max_model_tokens) if limit is not None]
        # A long conversation takes a while: once per answer, everything before it is rendered and tokenised.
        return await asyncio.to_thread(self._played, task, rows, index, engine.parser, min(limits, default=None))

    def _played(self, task: Task, rows: Rows, index: int, parser: BaseParser, limit: int | None) -> Episode:
        conversation = rows[index]
        try:
            sequences = parser.tokenize_and_mask(
                conversation.messages, tools=conversation.tools or None, method=self.config.method
            )
        except ConfigError as error:
            raise ConfigError(f"{rows.where(index)}: {error}") from error
        longest = max(len(sequence.token_ids) for sequence in sequences)
        if limit is None or longest <= limit:
            return self.episode(task, steps_of(conversation, sequences))
        if self.config.too_long == "skip":
            return self.episode(task, [], termination_reason=TerminationReason.MAX_PROMPT_TOKENS)
        raise ConfigError(
            f"{rows.where(index)} has {longest} tokens, and {limit} are allowed; shorten it, or set "
            'sft.too_long = "skip"'
        )


def steps_of(conversation: Conversation, sequences: Sequence[MaskedTokens]) -> list[Step]:
    """Steps whose completions are what is learnt; each continues the one before it within a sequence."""
    asked = list(_answers(conversation))
    found = [(number, sequence, *span) for number, sequence in enumerate(sequences) for span in _spans(sequence)]
    fits = len(asked) == len(found)  # a template may mark an answer in several pieces, or none of it
    steps = []
    for position, (number, sequence, start, stop) in enumerate(found):
        said: dict[str, Any] = {}
        if fits:
            at = asked[position]
            said = {"messages": conversation.messages[:at], "response": conversation.messages[at]}
        steps.append(
            Step(
                **said,
                prompt_ids=sequence.token_ids[:start],
                prompt_media=tuple(piece for piece in sequence.media if piece.stop <= start),
                completion_ids=sequence.token_ids[start:stop],
                segment=number,
                break_reason=sequence.break_reason if start == _spans(sequence)[0][0] else None,
                advantages=None if conversation.weight == 1 else repeated(conversation.weight, stop - start),
            )
        )
    return steps


def _answers(conversation: Conversation) -> Iterator[int]:
    """The positions of the messages that are learnt."""
    for index, message in enumerate(conversation.messages):
        if message["role"] == "assistant" and message.get("weight", 1):
            yield index


def _spans(sequence: MaskedTokens) -> list[tuple[int, int]]:
    """Starts and stops of what is learnt."""
    padded = np.concatenate(([False], sequence.loss_mask, [False]))
    return list(pairwise(np.flatnonzero(padded[1:] != padded[:-1]).tolist()))[::2]


def run_file() -> dict[str, Any]:
    """Supervised training with no further settings: plain negative log-likelihood, each row once per epoch."""
    return {
        "training": {"groups_per_step": 32, "rollouts_per_group": 1},
        "algorithm": {
            "name": "sft",
            "loss": "cross_entropy",
            "filter_termination_reasons": [TerminationReason.MAX_PROMPT_TOKENS.value],
        },
        "optimizer": {"schedule": "linear", "warmup_steps": 5, "final_learning_rate_fraction": 0.02},
    }
