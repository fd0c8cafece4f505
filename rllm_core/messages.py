"""Immutable messages, and conversations that share storage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Annotated, Any, NoReturn, Self, SupportsIndex, overload

from pydantic import PlainSerializer, PlainValidator

MAX_DEPTH = 100


def _frozen(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        "this data is frozen because recorded steps share it: replace the whole message (messages[i] = {...}), "
        "or edit a copy (copy.deepcopy(value))"
    )


class FrozenDict(dict[str, Any]):
    """A dictionary that can be read, compared and dumped like any other, but not changed.

    Copies are ordinary dictionaries: ``dict(frozen)`` and ``frozen | {...}`` at the top level,
    ``copy.deepcopy(frozen)`` at all levels.
    """

    __slots__ = ()
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _frozen

    def __reduce__(self) -> tuple[Any, ...]:
        return (freeze, (dict(self),))

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, _: object) -> dict[str, Any]:
        return thaw(self)  # type: ignore[no-any-return]


class SampledMessage(FrozenDict):
    """An assistant message with text that a model sampled. Only parsers treat it differently from other messages.

    Its text may repeat user text that spells control tokens. `completions` show which control tokens the model itself
    sampled. Copies as ordinary dictionaries are ordinary messages, whose author is trusted.

    Attributes:
        completions: Sampled ids of this message, or of all completions if the message was edited.
    """

    __slots__ = ("completions",)

    completions: tuple[Iterable[int], ...]

    def __init__(self, message: Mapping[str, Any], completions: Iterable[Iterable[int]]) -> None:
        super().__init__(message)
        self.completions = tuple(completions)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SampledMessage, (freeze(dict(self)), self.completions))


class FrozenList(list[Any]):
    """A list that can be read, compared and dumped like any other, but not changed; copies are ordinary lists."""

    __slots__ = ()
    __setitem__ = __delitem__ = append = extend = insert = pop = remove = clear = sort = reverse = _frozen
    __iadd__ = __imul__ = _frozen

    def __reduce__(self) -> tuple[Any, ...]:
        return (freeze, (list(self),))

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, _: object) -> list[Any]:
        return thaw(self)  # type: ignore[no-any-return]


_IMMUTABLE = frozenset({FrozenDict, FrozenList, SampledMessage})


def freeze(value: Any, *, depth: int = 0) -> Any:
    """Returns a deep, read-only copy of JSON-like data. Tuples become lists.

    Raises:
        ValueError: If JSON cannot represent the data without loss: numbers that are not finite, keys that are not text,
            half a surrogate pair, more than 100 levels, or other types.
    """
    kind = type(value)
    if kind is str:
        if not value.isascii() and well_formed(value) != value:
            raise ValueError(f"{value[:40]!r} has half a surrogate pair, which is not valid text (see well_formed)")
        return value
    if value is None or kind is bool or kind is int or kind in _IMMUTABLE:
        return value
    if depth > MAX_DEPTH:
        raise ValueError(f"data is nested more than {MAX_DEPTH} levels deep")
    if kind is float or isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be written as JSON")
        return float(value)
    if kind is dict or isinstance(value, Mapping):
        frozen = {}
        for key, item in value.items():
            if type(key) is not str or not key.isascii():
                if not isinstance(key, str):
                    raise ValueError(f"keys must be strings, got {key!r}")
                key = freeze(key)
            # Fast path: ASCII text needs no check, and most frozen data is messages with a role and text.
            frozen[key] = item if type(item) is str and item.isascii() else freeze(item, depth=depth + 1)
        return FrozenDict(frozen)
    if kind is list or isinstance(value, list | tuple):
        return FrozenList([freeze(item, depth=depth + 1) for item in value])
    if isinstance(value, str):  # e.g. a member of a StrEnum: keep its text
        return freeze(str.__str__(value))
    if isinstance(value, int):
        return int(value)
    raise ValueError(f"{kind.__name__} is not JSON data (allowed: str, int, float, bool, None, dict, list)")


def well_formed(text: str) -> str:
    r"""Escapes half surrogate pairs (as ``\ud800``), which tokenizers and files cannot represent."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def thaw(value: Any) -> Any:
    """Inverts `freeze`: returns plain dictionaries and lists that may be edited."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value


def identical(left: Any, right: Any) -> bool:
    """Whether two values are written as the same JSON; unlike ``==`` this tells 1 from True."""
    if left is right:
        return True
    if isinstance(left, dict) and isinstance(right, dict):
        return len(left) == len(right) and all(
            one == other and identical(left[one], right[other]) for one, other in zip(left, right, strict=True)
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(identical, left, right))
    return type(left) is type(right) and left == right and (left != 0 or repr(left) == repr(right))


def _json_dict(value: Any) -> FrozenDict:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a dictionary, got {type(value).__name__}")
    return freeze(value)  # type: ignore[no-any-return]


def _json_list(value: Any) -> FrozenList:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list, got {type(value).__name__}")
    return freeze(value)  # type: ignore[no-any-return]


JsonDict = Annotated[Mapping[str, Any], PlainValidator(_json_dict), PlainSerializer(thaw)]
JsonList = Annotated[Sequence[Any], PlainValidator(_json_list), PlainSerializer(thaw)]
Message = FrozenDict
_CONTENT = (str, list, tuple)
MessageLike = Mapping[str, Any]


def message(value: MessageLike) -> Message:
    """Freezes one chat message.

    Raises:
        ValueError: If it has no ``role``, or its content is neither text, a list of parts, nor ``None``.
    """
    kind = type(value)
    if kind is not dict and kind is not FrozenDict and not isinstance(value, Mapping):
        raise ValueError(f"a message is a dictionary with a role, got {type(value).__name__}")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"a message needs a role such as 'user', got {role!r}")
    if content is not None and not isinstance(content, _CONTENT):
        raise ValueError(f"message content must be text, a list of parts or None, got {type(content).__name__}")
    return value if kind is FrozenDict or kind is SampledMessage else freeze(value)  # type: ignore[return-value]


class MessageView(Sequence[Message]):
    """A read-only view of the first ``length`` messages of a shared, append-only log."""

    __slots__ = ("_length", "_log")

    _log: list[Message]
    _length: int

    def __init__(self, messages: Iterable[MessageLike] = ()) -> None:
        if isinstance(messages, MessageView):
            self._log, self._length = messages._log, messages._length
            return
        if type(messages) is not list and (isinstance(messages, Mapping | str) or not isinstance(messages, Iterable)):
            raise ValueError(f"a conversation is a list of messages, got {type(messages).__name__}")
        self._log = [message(m) for m in messages]
        self._length = len(self._log)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            log = self._log
            return log[index] if len(log) == self._length else log[: self._length][index]
        if not -self._length <= index < self._length:
            raise IndexError(f"message {index} of {self._length}")
        return self._log[index % self._length]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._log[: self._length])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MessageView):
            return other._length == self._length and (other._log is self._log or self[:] == other[:])
        return self[:] == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[MessageLike]) -> Messages:
        joined = Messages(self)
        for value in other:
            joined.append(value)
        return joined

    def __radd__(self, other: Iterable[MessageLike]) -> Messages:
        return Messages(other) + self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self[:]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self[:],))

    def __copy__(self) -> MessageView:
        return type(self)(self)

    def __deepcopy__(self, _: object) -> MessageView:
        return type(self)(self)  # its messages cannot change

    def view(self) -> MessageView:
        """Returns a view of this conversation as it is now. It shares storage, but later appends do not show in it."""
        view = MessageView.__new__(MessageView)
        view._log, view._length = self._log, self._length
        return view

    def goes_on_from(self, earlier: MessageView) -> bool:
        """Whether this contains all of ``earlier`` in shared storage, so that no messages need to be compared."""
        return self._log is earlier._log and self._length >= earlier._length

    def extended(self, messages: Iterable[MessageLike]) -> MessageView:
        """Returns this conversation plus ``messages``. Shares storage unless something else was appended before."""
        return (self + messages).view()


class Messages(MessageView, MutableSequence[Message]):
    """A conversation that is used like a list of dictionaries, and cheap to snapshot.

    ``messages.append({"role": "user", "content": "hi"})`` freezes the dictionary and appends it to a shared log. A step
    holds a view of that log, so its messages never change, and n turns need memory linear in n. Replacing or removing
    an earlier message copies the log first.

        messages = Messages([{"role": "user", "content": "hi"}])
        seen = messages.view()
        messages.append({"role": "assistant", "content": "hello"})
        assert len(seen) == 1
    """

    __slots__ = ()

    def insert(self, index: SupportsIndex, value: MessageLike) -> None:
        """Inserts before ``index``. At the end, this is an append and copies nothing."""
        position = index.__index__()
        if position >= self._length:
            self.append(value)
            return
        log = self._log[: self._length]
        log.insert(position, message(value))
        self._log, self._length = log, len(log)

    def __setitem__(self, index: Any, value: Any) -> None:
        log = self._log[: self._length]
        log[index] = [message(m) for m in value] if isinstance(index, slice) else message(value)
        self._log, self._length = log, len(log)

    def __delitem__(self, index: int | slice) -> None:
        log = self._log[: self._length]
        del log[index]
        self._log, self._length = log, len(log)

    def append(self, value: MessageLike) -> None:
        """Freezes a message and adds it at the end."""
        frozen, log, length = message(value), self._log, self._length
        if len(log) == length:
            log.append(frozen)
        # Another conversation may have appended here before, or, in another thread, between the last two lines.
        if log[length] is not frozen:
            self._log = [*log[:length], frozen]
        self._length = length + 1

    def extend(self, values: Iterable[MessageLike]) -> None:
        """Appends several messages."""
        for value in list(values):
            self.append(value)

    def __iadd__(self, values: Iterable[MessageLike]) -> Self:
        self.extend(values)
        return self

    def copy(self) -> Messages:
        """Returns a second conversation that continues from here and shares storage up to this point."""
        return Messages(self)


def snapshot(messages: Sequence[MessageLike], previous: MessageView) -> MessageView:
    """Returns a view of ``messages`` as they are now. Shares storage with ``previous`` if they start with it."""
    if type(messages) is Messages or isinstance(messages, MessageView):
        if messages._log is previous._log or not previous._length:
            return messages.view()
    elif isinstance(messages, Mapping | str) or not isinstance(messages, Sequence):
        return MessageView(messages)  # raises an error that describes the problem
    known = len(previous)
    if known and len(messages) >= known and all(identical(messages[i], previous[i]) for i in range(known)):
        return previous.extended(messages[known:])
    return MessageView(messages)


MessageViewField = Annotated[
    MessageView, PlainValidator(lambda value: MessageView(value)), PlainSerializer(lambda view: [thaw(m) for m in view])
]
