"""Base class of the data types: validation, comparison, copies and lossless JSON. Also the types of their fields."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sized
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined

from rllm_core.messages import FrozenDict, FrozenList, MessageView

Count = Annotated[int, Field(strict=True, ge=0)]


def finite_number(value: Any) -> float:
    """Converts ``value`` to a float: a bool to 0 or 1; numpy, torch and ``decimal`` numbers to their value.

    Raises:
        ValueError: If it is not a single finite number.
    """
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__") or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"expected a finite number or a bool, got {type(value).__name__} {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"expected a finite number, got an {type(value).__name__} too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number


def _flag(value: Any) -> bool:
    """Returns a bool, also for one of numpy or torch.

    Raises:
        ValueError: If it is anything else.
    """
    if isinstance(value, bool):
        return value
    if getattr(value, "shape", None) != () or str(getattr(value, "dtype", "")) not in ("bool", "torch.bool"):
        raise ValueError(f"expected True or False, got {type(value).__name__} {value!r:.80}")
    return bool(value)


Reward = Annotated[float, BeforeValidator(finite_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


def new_id() -> str:
    """Returns a new opaque id of 112 random bits, unique in all processes."""
    return os.urandom(14).hex()


def check_lengths(length: int, unit: str, arrays: Mapping[str, Sized | None], *, owner: str = "") -> None:
    """Raises a ValueError if one of ``arrays`` has another length; the keys name the arrays' contents."""
    for name, array in arrays.items():
        if array is not None and len(array) != length:
            raise ValueError(f"{owner}{len(array)} {name} for {length} {unit}")


class Record(BaseModel):
    """Base class of the data types. Unknown fields are errors, assignments are validated, and JSON is lossless."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)

    def to_json(self) -> str:
        """Returns one line of JSON, from which `from_json` builds an equal record."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Builds a record from the output of `to_json`."""
        return cls.model_validate_json(text)

    @classmethod
    def _trusted(cls, **given: Any) -> Self:
        """Like ``cls(**given)``, for values that the core has created itself or already checked.

        Not for plugins: nothing is validated. Fields with a default factory must be given.
        """
        blank = _blanks.get((cls, *given)) or _blank(cls, *given)
        return cls._of(blank.fields | given, blank.names)

    @classmethod
    def _of(cls, fields: dict[str, Any], names: set[str]) -> Self:
        """Returns a record with all its ``fields``; ``names`` are those that the caller gave."""
        record = object.__new__(cls)
        _set_fields(record, fields)
        _set_names(record, names)
        _set_extra(record, None)
        _set_private(record, None)
        return record

    def _copied(self) -> Self:
        """Returns a record with the same values, for classes whose fields are all immutable."""
        return self._of(self.__dict__.copy(), self.__pydantic_fields_set__)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__pydantic_fields_set__:  # copy it first: trusted records and copies share this set
            _set_names(self, {*self.__pydantic_fields_set__})
        before = self.__dict__.get(name)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            # Validators of several fields run after the assignment, so undo it.
            if name in self.__dict__:
                self.__dict__[name] = before
            raise

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self is other or all(_equal(getattr(self, name), getattr(other, name)) for name in self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Returns a copy with its own fields. It shares arrays, messages and JSON data, which are immutable."""
        copied = self.model_copy()
        for name, value in copied.__dict__.items():
            if type(value) in (list, dict):
                copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self).model_validate, (self._fields(),))

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dict__}


_set_fields, _set_names, _set_extra, _set_private = (
    vars(BaseModel)[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


class _Blank(NamedTuple):
    """Template for trusted records of one class with the same given fields.

    Attributes:
        fields: All fields with their defaults. This is the dictionary of an instance: its copies share their keys,
            which saves a third of a step's memory.
        names: Names of the given fields.
    """

    fields: dict[str, Any]
    names: set[str]


_blanks: dict[tuple[type[Record] | str, ...], _Blank] = {}  # by class and names


def _blank(cls: type[Record], *names: str) -> _Blank:
    # An instance's dictionary shares its keys with its copies. A class shares at most 30 names, so each has its own.
    attributes = type("Attributes", (), {})()
    for name, field in cls.model_fields.items():
        shareable = field.default_factory in (FrozenDict, FrozenList, MessageView)  # immutable
        setattr(attributes, name, field.get_default(call_default_factory=True) if shareable else field.default)
    missing = [name for name, value in attributes.__dict__.items() if value is PydanticUndefined and name not in names]
    if missing:
        raise TypeError(f"a trusted {cls.__name__} needs {', '.join(missing)}")
    if unknown := set(names) - cls.model_fields.keys():
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    blank = _blanks[cls, *names] = _Blank(attributes.__dict__, set(names))
    return blank


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return False  # None is not an empty array
    return bool(left == right)
