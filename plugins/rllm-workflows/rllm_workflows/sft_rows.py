"""Datasets of conversations in JSON lines or parquet: every row is checked on opening, and read on demand."""

from __future__ import annotations

import json
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

from rllm_core.errors import ConfigError
from rllm_core.types import Messages
from rllm_workflows.dataset_rows import missing, without_nulls

ItemT = TypeVar("ItemT")

FORMATS = (".jsonl", ".parquet")
IDS, MASK = "input_ids", "assistant_masks"
MAX_WEIGHT = 1e30  # like the core's limit of rewards: losses are float32, and sum over tokens


@dataclass(frozen=True)
class ConversationRow:
    """One row of the dataset.

    Attributes:
        messages: Messages in OpenAI's format, at least one of them from the assistant.
        tools: Tools that the model may call, in the parser's format.
        weight: Weight of the row's target tokens.
        token_ids: Tokens of the whole conversation, as a run recorded them; None if the row has none.
        loss_mask: ``(tokens,)``, 1 for target tokens.
    """

    messages: Messages
    tools: tuple[Mapping[str, Any], ...] = ()
    weight: float = 1.0
    token_ids: Sequence[int] | None = None
    loss_mask: Sequence[int] = ()

    @classmethod
    def of(cls, row: Any) -> ConversationRow:
        """Builds a conversation from column ``messages`` and the optional ``tools``, ``weight`` and token columns.

        ``messages`` and ``tools`` may be JSON strings, since a parquet column has one type for all rows. Other columns
        are ignored.

        Raises:
            ConfigError: If the row is invalid.
        """
        if not isinstance(row, Mapping):
            raise ConfigError('a row must be an object {"messages": [...]}')
        messages, tools, weight = _list(row, "messages"), _list(row, "tools"), row.get("weight")
        if not messages:
            raise ConfigError("the row has no messages")
        for index, message in enumerate(messages):
            _check_message(message, f"messages[{index}]")
        if not any(message["role"] == "assistant" for message in messages):
            raise ConfigError("no message has role 'assistant', so there is nothing to learn from")
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise ConfigError("tools must be a list of objects")
        weight = 1.0 if weight is None else weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MAX_WEIGHT:
            raise ConfigError(
                f"weight = {weight!r:.40} must be a number above 0 and at most {MAX_WEIGHT:g}; to ignore a row, "
                "remove it"
            )
        try:
            kept = Messages([{key: m[key] for key in m if m[key] is not None} for m in messages])
        except ValueError as error:
            raise ConfigError(f"its messages are invalid: {' '.join(str(error).split())}") from error
        return cls(kept, tuple(tools), float(weight), *_tokens(row))


def _list(row: Mapping[str, Any], column: str) -> list[Any]:
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{column} is a string, but not valid JSON: {error}") from error
    if value is None:
        return []
    if not isinstance(value, list):
        raise ConfigError(f"{column} must be a list, not {type(value).__name__}")
    return value


def _tokens(row: Mapping[str, Any]) -> tuple[list[int] | None, list[int]]:
    ids, mask = row.get(IDS), row.get(MASK)
    if ids is None and mask is None:
        return None, []
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask) or not ids:
        raise ConfigError(f"{IDS} and {MASK} must be lists of the same length")
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ConfigError(f"{IDS} must be token ids")
    if not all(type(bit) is int and bit in (0, 1) for bit in mask) or mask[0] or not any(mask):
        raise ConfigError(f"{MASK} must have a 1 for each target token and a 0 for others, such as the first token")
    return ids, mask


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where} has no role")
    if content is None and not message.get("tool_calls"):
        raise ConfigError(f"{where}, with role {role!r}, has neither content nor tool_calls")
    if content is not None and not isinstance(content, str | list):
        raise ConfigError(f"{where}.content must be a string or a list of parts, not {type(content).__name__}")


class OnDemand(Sequence[ItemT]):
    """A sequence whose items are created on access."""

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> list[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | list[ItemT]:
        if isinstance(index, slice):
            return [self.item(position) for position in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)}")
        return self.item(index)

    @abstractmethod
    def item(self, index: int) -> ItemT:
        """Creates the item at ``index``, which is in range."""


class ConversationRows(OnDemand[ConversationRow]):
    """The rows of a file: opening checks all of them, and each access reads its row again.

    Attributes:
        unit: Name of a row in messages, such as a line.

    Args:
        path: Dataset file.
    """

    unit: ClassVar[str] = "row"

    def __init__(self, path: Path) -> None:
        self.path = path

    def item(self, index: int) -> ConversationRow:
        """Reads a row."""
        return self._conversation(index, self._read(index))

    def where(self, index: int) -> str:
        """Describes the place of a row, for messages."""
        return f"{self.path} {self.unit} {self.number(index)}"

    def number(self, index: int) -> int:
        """Returns the number of a row in its file, from 1."""
        return index + 1

    @abstractmethod
    def _read(self, index: int) -> Any: ...

    def _conversation(self, index: int, row: Any) -> ConversationRow:
        try:
            return ConversationRow.of(row)
        except ConfigError as error:
            raise ConfigError(f"{self.where(index)}: {error}") from error


class JsonLinesRows(ConversationRows):
    """One row per line; only the file offsets stay in memory."""

    unit = "line"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._offsets, self._numbers = array("Q"), array("Q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    index = len(self._offsets)
                    self._offsets.append(offset)
                    self._numbers.append(number)
                    self._conversation(index, self._parsed(index, line))
                offset += len(line)
        self._ends = array("Q", [*self._offsets[1:], offset])

    def __len__(self) -> int:
        return len(self._offsets)

    def number(self, index: int) -> int:
        """Returns the number of the line; empty lines count."""
        return self._numbers[index]

    def _read(self, index: int) -> Any:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offsets[index])
                line = file.read(self._ends[index] - self._offsets[index])
        except OSError as error:
            raise ConfigError(f"{self.where(index)} can no longer be read: {error.strerror}") from error
        return self._parsed(index, line)

    def _parsed(self, index: int, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.where(index)} is not JSON: {error}") from error


class ParquetRows(ConversationRows):
    """One row per table row; the table stays in memory as Arrow columns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise ConfigError(f"{path} needs pyarrow: pip install 'rllm-workflows[parquet]'") from error
        columns = ("messages", "tools", "weight", IDS, MASK)
        try:
            known = parquet.read_schema(path).names
            self._table = parquet.read_table(path, columns=[name for name in columns if name in known])
        except (ArrowException, OSError) as error:
            raise ConfigError(f"{path} cannot be read as parquet: {' '.join(str(error).split())}") from error
        for index in range(len(self)):
            self._conversation(index, self._read(index))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _read(self, index: int) -> Any:
        [row] = self._table.slice(index, 1).to_pylist()
        return without_nulls(row)


def open_rows(path: Path) -> ConversationRows:
    """Opens a file of rows; the suffix determines the format.

    Raises:
        ConfigError: If the file does not exist, has an unknown format, or has an invalid row; names the line.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} must end in {' or '.join(FORMATS)}")
    if not path.is_file():
        raise ConfigError(missing(path))
    rows = JsonLinesRows(path) if path.suffix == ".jsonl" else ParquetRows(path)
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows
