"""Converts rows to questions with answers: roles of columns, allowed values, and identity of rows."""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from rllm_core.errors import ConfigError
from rllm_core.plugins.loading import suggest
from rllm_core.text import counted
from rllm_workflows import rewards
from rllm_workflows.dataset_rows import DatasetRows, Row, check_columns

logger = logging.getLogger(__name__)

MAX_ID_CHARACTERS = 256

TEXT, NUMBER, TEXTS = "text", "a number", "a list of texts"


@dataclass(frozen=True)
class Columns:
    """Column names; "" for a column the dataset does not have.

    Attributes:
        question: Question to the model.
        answer: Answer the reward function compares with.
        system: System message.
        tools: Tools the model may call, in OpenAI format.
        id: Unique id of the row.
        kept: Additional columns for the reward function.
    """

    question: str
    answer: str
    system: str = ""
    tools: str = ""
    id: str = ""
    kept: tuple[str, ...] = ()

    @property
    def wanted(self) -> list[str]:
        """All column names, each once."""
        return list(dict.fromkeys(name for name in (*self._named, *self.kept) if name))

    @property
    def _named(self) -> tuple[str, ...]:
        return (self.question, self.answer, self.system, self.tools, self.id)


@dataclass(frozen=True)
class Example:
    """A checked row.

    Attributes:
        data: Data of the row's task: ``question`` and ``answer``; ``system`` and ``tools`` if the row has them; and
            ``row`` with the columns for the reward function.
        answer_kind: Type of the answer; the same for the whole column.
        given_id: Value of the id column, or None if there is no such column.
    """

    data: dict[str, Any]
    answer_kind: str
    given_id: str | None

    @cached_property
    def digest(self) -> int:
        """64-bit hash of the content, independent of the storage format."""
        return _digest(json.dumps(self.data, sort_keys=True, ensure_ascii=False))

    @property
    def key(self) -> int:
        """64-bit hash of the row's id, or of its content if it has no id."""
        return self.digest if self.given_id is None else _digest(self.given_id)

    @property
    def task_id(self) -> str:
        """The row's id, or the digest if it has none."""
        return f"{self.digest:016x}" if self.given_id is None else self.given_id


def read(row: Row, columns: Columns, reward: str) -> Example:
    """Converts a row to an example.

    Args:
        row: Row to convert.
        columns: Roles of the columns.
        reward: Name of the reward function that reads the answer.

    Raises:
        ConfigError: If a value is missing or invalid; the message names the column and the value.
    """
    answer, kind = _answer(_value(row, columns.answer), columns.answer, reward)
    data: dict[str, Any] = {"question": _text(_value(row, columns.question), columns.question), "answer": answer}
    if columns.system:
        data["system"] = _text(_value(row, columns.system), columns.system)
    if columns.tools:
        data["tools"] = _tools(_value(row, columns.tools), columns.tools)
    if columns.kept:
        data["row"] = {name: _json(_value(row, name), name) for name in columns.kept}
    return Example(data, kind, _id(_value(row, columns.id), columns.id) if columns.id else None)


class Examples:
    """The rows of a source; checks each row once and keeps none.

    Attributes:
        rows: Source to read rows from again.
        digests: Hashes of the content, ``(rows,)``, to detect later changes.
        questions: Hashes of the questions, ``(rows,)``; of the rows' identities if all questions are equal.
        answers: Hashes of all answers, sorted.

    Raises:
        ConfigError: If there are no rows, a row is invalid, or two rows share an id; the message names them.
    """

    def __init__(self, rows: DatasetRows, columns: Columns, reward: str) -> None:
        self.rows = rows
        self._columns = columns
        self._reward = reward
        digests, keys, questions, answers = array("Q"), array("Q"), array("Q"), array("Q")
        kind = None
        for index, row in enumerate(rows):
            example = self._read(index, row)
            kind = kind or example.answer_kind
            if example.answer_kind != kind:
                raise ConfigError(
                    f"{rows.where(index)}: {columns.answer!r} is {example.answer_kind}, but {kind} in {rows.where(0)}; "
                    "all answers must have the same type"
                )
            digests.append(example.digest)
            keys.append(example.key)
            questions.append(_digest(" ".join(example.data["question"].casefold().split())))
            answers.extend(map(_digest, _stated(example.data["answer"])))
        if kind is None:
            raise ConfigError(f"{rows.source} has no rows")
        self.digests, identities = np.array(digests, np.uint64), np.array(keys, np.uint64)
        self.answers = np.unique(np.array(answers, np.uint64))
        self._check_unique(identities)
        asked = np.array(questions, np.uint64)
        self.questions = asked if (asked != asked[0]).any() else identities

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, index: int) -> Example:
        example = self._read(index, self.rows[index])
        if example.digest != self.digests[index]:
            raise ConfigError(
                f"{self.rows.where(index)} has changed since the run started; do not edit the source during a run"
            )
        return example

    def has_answer(self, text: str) -> bool:
        """Whether a text is the answer of any row, or ends in one as its last line or word."""
        said = {text, *text.strip().splitlines()[-1:], *text.split()[-1:]}
        found = np.array([_digest(one) for one in map(_plain, said)], np.uint64)
        return bool(np.isin(found, self.answers).any())

    def held_out(self, share: float) -> npt.NDArray[np.bool_]:
        """Returns a mask of held-out rows, ``(rows,)``: about ``share``, by a machine-independent hash of the question.

        Rows with the same question are on the same side: a question that is trained says nothing about unseen ones.
        """
        return np.asarray(self.questions.astype(np.float64) / 2.0**64 < share)

    def _read(self, index: int, row: Row) -> Example:
        try:
            if index == 0:
                check_columns("it", self._columns.wanted, list(row))
            return read(row, self._columns, self._reward)
        except ConfigError as error:
            raise ConfigError(f"{self.rows.where(index)}: {error}") from None

    def _check_unique(self, keys: npt.NDArray[np.uint64]) -> None:
        order = np.argsort(keys, kind="stable")
        again = np.flatnonzero(keys[order][1:] == keys[order][:-1]) + 1
        if len(again) == 0:
            return
        place = min(again, key=lambda position: order[position])
        first, second = (self.rows.where(int(order[at])) for at in (place - 1, place))
        if self._columns.id:
            raise ConfigError(f"{second}: {self._columns.id!r} is the same as in {first}; ids must be unique")
        raise ConfigError(f"{second} is the same as {first}; remove one, or set dataset.id to a column with unique ids")


def check_no_overlap(train: Examples, validation: Examples) -> None:
    """Checks that two sources share no row, and warns if they share questions.

    Raises:
        ConfigError: If a row is in both.
    """
    both, at, other = np.intersect1d(validation.digests, train.digests, return_indices=True)
    if len(both):
        place = int(np.argmin(at))
        raise ConfigError(
            f"{validation.rows.where(int(at[place]))} is the same as {train.rows.where(int(other[place]))}; training "
            "and validation must not overlap"
        )
    trained = np.isin(validation.questions, train.questions)
    if trained.any():
        logger.warning(
            "%s of the %s in %s ask a question that is also trained, the first in %s; the validation overestimates "
            "what the model can do with new questions",
            trained.sum(),
            counted(len(validation), "row"),
            validation.rows.source,
            validation.rows.where(int(np.argmax(trained))),
        )


def _stated(answer: Any) -> list[str]:
    return [_plain(str(one)) for one in (answer if isinstance(answer, list | tuple) else [answer])]


def _plain(text: str) -> str:
    return text.strip().casefold()


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _value(row: Row, column: str) -> Any:
    value = row.get(column)
    if value is None:
        raise ConfigError(f"{column!r} is " + ("null" if column in row else f"missing; {suggest(column, list(row))}"))
    return value


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{column!r} must be text, got {_shown(value)}")
    if not value.strip():
        raise ConfigError(f"{column!r} is empty")
    return _encodable(value, column)


def _encodable(value: str, column: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{column!r} contains an unpaired surrogate (\\u{ord(value[error.start]):04x}), which cannot be encoded"
        ) from None
    return value


def _answer(value: Any, column: str, reward: str) -> tuple[Any, str]:
    kind = _kind(value, column)
    if kind == TEXT:
        _text(value, column)
    elif kind == TEXTS:
        for text in value:
            _text(text, column)
    problem = rewards.unusable(reward, value)
    if problem:
        raise ConfigError(f"{column!r}: {problem}, which reward {reward!r} needs")
    return value, kind


def _kind(value: Any, column: str) -> str:
    if isinstance(value, str):
        return TEXT
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{column!r} must be a finite number, got {value}")
        return NUMBER
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return TEXTS
    raise ConfigError(f"{column!r} must be {TEXT}, {NUMBER} or {TEXTS}, got {_shown(value)}")


def _tools(value: Any, column: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{column!r} is text that is not JSON: {error}") from None
    if not isinstance(value, list) or not all(_is_tool(tool) for tool in value):
        raise ConfigError(
            f'{column!r} must be a list of {{"type": "function", "function": {{"name": ...}}}}, got {_shown(value)}'
        )
    _json(value, column)
    return value


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _json(value: Any, column: str) -> Any:
    try:
        _encodable(json.dumps(value, allow_nan=False, ensure_ascii=False), column)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{column!r} must be valid JSON, got {_shown(value)}: {error}") from None
    return value


def _id(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{column!r} must be text or an integer, got {_shown(value)}")
    text = _text(str(value), column)
    if len(text) > MAX_ID_CHARACTERS or not text.isprintable():
        raise ConfigError(f"{column!r} must be one line of at most {MAX_ID_CHARACTERS} characters, got {_shown(value)}")
    return text


def _shown(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"
