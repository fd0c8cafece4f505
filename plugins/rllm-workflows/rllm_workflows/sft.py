"""Workflow ``sft``: supervised training on example conversations, one task per row of a dataset."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, MaskedTokens, MaskMethod
from rllm_core.tokens import repeated, token_ids
from rllm_core.types import Episode, Step, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig
from rllm_workflows.sft_rows import IDS, MASK, ConversationRow, ConversationRows, OnDemand, open_rows


class SFTConfig(WorkflowConfig):
    """``[sft]``: the example conversations, and how they become tokens."""

    train: Annotated[str, Field(min_length=1, description="File of example conversations, .jsonl or .parquet.")]
    validation: Annotated[str, Field(description="File of held-out conversations. Defaults to no validation.")] = ""
    method: Annotated[
        Literal[MaskMethod, "recorded"],
        Field(
            description="Conversion to sequences. cumulative: one per conversation, as in a rollout. stepwise: one "
            "sequence per assistant message, after the rendered messages before it. hf_template: the mask of the "
            "chat template's own {% generation %}. recorded: the row's own tokens and mask, of the same tokenizer."
        ),
    ] = "cumulative"
    max_tokens: Annotated[
        int | None, Field(ge=1, description="Maximum tokens per sequence. Defaults to the model's own maximum.")
    ] = None
    too_long: Annotated[
        Literal["error", "skip"],
        Field(description="What to do with a row over the limit: fail the run, or skip the row as filtered."),
    ] = "error"


class _RowTasks(OnDemand[Task]):
    """One task per row."""

    def __init__(self, rows: ConversationRows, split: Split) -> None:
        self.rows = rows
        self.split = split

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> Task:
        task_id = f"{self.rows.path.name}:{self.rows.number(index)}"
        return Task(task_id=task_id, data={"split": self.split, "row": index})


class SFTWorkflow(Workflow):
    """Turns rows into episodes without calling the model, with the parser's ``tokenize_and_mask``.

    There is no reward. A row's ``weight`` is the advantage of its target tokens.
    """

    name: ClassVar[str] = "sft"
    config_model: ClassVar[type[WorkflowConfig]] = SFTConfig
    samples: ClassVar[bool] = False
    config: SFTConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._opened: dict[Split, ConversationRows] = {}

    def tasks(self, split: Split) -> Sequence[Task]:
        """See `Workflow.tasks`; each task is created on access."""
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
        """Returns the row's tokens as steps that were not sampled."""
        engine = completer.engine
        if engine.parser is None:
            raise ConfigError(f"workflow 'sft' needs a parser, but engine {engine.name!r} has none")
        rows, index = self._opened[task.data["split"]], task.data["row"]
        limits = [limit for limit in (self.config.max_tokens, engine.max_model_tokens) if limit is not None]
        # In a thread: long conversations take a while, since each assistant message renders all messages before it.
        return await asyncio.to_thread(self._tokenized, task, rows, index, engine.parser, min(limits, default=None))

    def _sequences(self, conversation: ConversationRow, parser: BaseParser) -> Sequence[MaskedTokens]:
        if self.config.method == "recorded":
            return [recorded(conversation, parser)]
        tools = conversation.tools or None
        return parser.tokenize_and_mask(conversation.messages, tools=tools, method=self.config.method)

    def _tokenized(
        self, task: Task, rows: ConversationRows, index: int, parser: BaseParser, limit: int | None
    ) -> Episode:
        conversation = rows[index]
        try:
            sequences = self._sequences(conversation, parser)
        except ConfigError as error:
            raise ConfigError(f"{rows.where(index)}: {error}") from error
        longest = max(len(sequence.token_ids) for sequence in sequences)
        if limit is None or longest <= limit:
            return self.episode(task, steps_of(conversation, sequences))
        if self.config.too_long == "skip":
            return self.episode(task, [], termination_reason=TerminationReason.MAX_PROMPT_TOKENS)
        raise ConfigError(
            f"{rows.where(index)} has {longest} tokens, but the limit is {limit}; shorten it, or set "
            'sft.too_long = "skip"'
        )


def recorded(conversation: ConversationRow, parser: BaseParser) -> MaskedTokens:
    """Returns the tokens that a row stores.

    Raises:
        ConfigError: If the row stores no tokens, or tokens of another tokenizer.
    """
    if conversation.token_ids is None:
        raise ConfigError(f'the row has no {IDS} and {MASK}, which sft.method = "recorded" reads')
    for token, spelled in zip(conversation.token_ids, parser.spell(conversation.token_ids), strict=True):
        if not spelled:
            raise ConfigError(f"the tokenizer has no token {token}; the row was recorded with another one")
    return MaskedTokens(token_ids(conversation.token_ids), np.array(conversation.loss_mask, np.bool_))


def steps_of(conversation: ConversationRow, sequences: Sequence[MaskedTokens]) -> list[Step]:
    """Builds steps whose completions are the target tokens; within a sequence, each continues the previous one."""
    asked = [
        index
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and message.get("weight", 1)
    ]
    found = [(number, sequence, *span) for number, sequence in enumerate(sequences) for span in _spans(sequence)]
    fits = len(asked) == len(found)  # a template may mask a message in several spans, or not at all
    steps = []
    for position, (number, sequence, start, stop) in enumerate(found):
        said: dict[str, Any] = {}
        if fits:
            at = asked[position]
            said = {"messages": conversation.messages[:at], "response": conversation.messages[at]}
        steps.append(
            Step(
                **said,
                tools=conversation.tools,
                prompt_ids=sequence.token_ids[:start],
                prompt_media=tuple(piece for piece in sequence.media if piece.stop <= start),
                completion_ids=sequence.token_ids[start:stop],
                segment=number,
                break_reason=sequence.break_reason if start == _spans(sequence)[0][0] else None,
                advantages=None if conversation.weight == 1 else repeated(conversation.weight, stop - start),
            )
        )
    return steps


def _spans(sequence: MaskedTokens) -> list[tuple[int, int]]:
    """Returns the starts and stops of the target tokens."""
    padded = np.concatenate(([False], sequence.loss_mask, [False]))
    return list(pairwise(np.flatnonzero(padded[1:] != padded[:-1]).tolist()))[::2]


def run_file() -> dict[str, Any]:
    """Returns the default settings of supervised training: negative log-likelihood, each row once per epoch."""
    return {
        "training": {"groups_per_step": 32, "rollouts_per_group": 1},
        "algorithm": {
            "name": "sft",
            "loss": "cross_entropy",
            "filter_termination_reasons": [TerminationReason.MAX_PROMPT_TOKENS.value],
        },
        "optimizer": {"schedule": "linear", "warmup_steps": 5, "final_learning_rate_fraction": 0.02},
    }
