"""Token ids and per-token numbers, as read-only numpy arrays."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, TypeGuard

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator

TokenIds = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)
_MAX_TOKEN_ID = 2**31 - 1
# Copies of long arrays need new pages of memory, which takes longer than to compare them token by token.
_COMPARED_AS_BYTES = 1 << 14
_SPARE = 4  # a buffer gets a quarter more space than it needs


def token_ids(value: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
    """Returns a read-only ``int32`` array of shape ``(tokens,)``.

    A read-only ``int32`` array is shared; anything that its owner could still change is copied.

    Raises:
        ValueError: If a value is not an integer between 0 and 2**31 - 1.
    """
    array = _checked_ids(value)
    return _read_only(array) if type(value) is list else _owned(array)


def _checked_ids(value: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
    """Like `token_ids`, but may return the argument itself, or an array that can be changed."""
    array = value if type(value) is np.ndarray else np.asarray(_unpacked_if_text(value))
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        return _EMPTY_IDS
    kind = array.dtype.kind
    if kind != "i" and kind != "u":
        raise ValueError(f"token ids must be integers, got {array.dtype}")
    # argmin and argmax avoid the setup cost of a reduction, which dominates on arrays as short as a completion.
    if array.item(array.argmin()) < 0 or (array.dtype is not _INT32 and array.item(array.argmax()) > _MAX_TOKEN_ID):
        raise ValueError("token ids must lie between 0 and 2**31 - 1")
    return array if array.dtype is _INT32 else array.astype(np.int32)


def is_id_array(value: object) -> TypeGuard[TokenIds]:
    """Whether it is an array with the type and shape of token ids, regardless of values."""
    return type(value) is np.ndarray and value.dtype is _INT32 and value.ndim == 1


def logprobs(value: Sequence[float] | npt.NDArray[Any]) -> Floats:
    """Returns a read-only ``float32`` array of natural-log probabilities, each finite and at most 0 (plus rounding)."""
    array, _, highest = _finite_floats(value, what="log-probabilities")
    if highest > 1e-3:
        raise ValueError(f"log-probabilities must not be positive, got {highest:.4g}")
    return array


def _weights(value: Sequence[float] | npt.NDArray[Any], *, what: str) -> Floats:
    """Returns a read-only ``float32`` array. If all tokens have the same value, as is common, stores it once."""
    array, lowest, highest = _finite_floats(value, what=what)
    if lowest == highest and array.size > 1 and array.strides != (0,):
        return repeated(lowest, array.size)
    return array


def repeated(value: float, length: int) -> Floats:
    """Returns a read-only ``float32`` array that repeats one number but stores it once."""
    array = np.ndarray((length,), np.float32, np.array((value,), np.float32), 0, (0,))
    array.setflags(write=False)
    return array


def _finite_floats(value: Sequence[float] | npt.NDArray[Any], *, what: str) -> tuple[Floats, float, float]:
    """Returns the array, its minimum and its maximum (0 and 0 if it is empty)."""
    array = value if type(value) is np.ndarray else np.asarray(_unpacked_if_text(value))
    if array.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        return _EMPTY_FLOATS, 0.0, 0.0
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{what} must be numbers, got {array.dtype}")
    if array.dtype != _FLOAT32:
        with np.errstate(over="ignore"):  # overflow is reported below
            array = array.astype(np.float32)
    # NaN counts as both extremes, so these two values reveal every number that is not finite.
    lowest, highest = array.item(array.argmin()), array.item(array.argmax())
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise ValueError(f"{what} must be finite")
    return _owned(array), lowest, highest


def _owned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return _read_only(array.copy()) if array.flags.writeable else array


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


def _to_list(array: Any) -> list[Any]:
    return np.asarray(array).tolist()  # type: ignore[no-any-return]


_EMPTY_IDS = np.empty(0, np.int32)
_EMPTY_IDS.setflags(write=False)
_EMPTY_FLOATS = np.empty(0, np.float32)
_EMPTY_FLOATS.setflags(write=False)

TokenIdsField = Annotated[TokenIds, PlainValidator(token_ids), PlainSerializer(_to_list)]
LogprobsField = Annotated[Floats, PlainValidator(logprobs), PlainSerializer(_to_list)]
AdvantagesField = Annotated[Floats, PlainValidator(partial(_weights, what="advantages")), PlainSerializer(_to_list)]
TokenRewardsField = Annotated[
    Floats, PlainValidator(partial(_weights, what="token rewards")), PlainSerializer(_to_list)
]


def packed(array: TokenIds | Floats) -> str:
    """Returns an array of ids or numbers as text, in about a quarter of the characters of JSON numbers.

    The text is the numpy name of the type, a colon, and the little-endian values in base64: ``"<f4:AACAPw=="``. Ids use
    the smallest type that holds them. Fields of ids and numbers accept this text, without loss.
    """
    kind = _smallest(array) if array.dtype == _INT32 else _PACKED_FLOATS
    content = array.astype(_PACKED_TYPES[kind], copy=False).tobytes()
    return f"{kind}:{binascii.b2a_base64(content, newline=False).decode()}"


def _smallest(ids: npt.NDArray[Any]) -> str:
    """Returns the smallest type that holds the ids."""
    highest = ids.item(ids.argmax()) if ids.size else 0
    for kind, limit in _ID_TYPES.items():
        if highest <= limit:
            return kind
    raise AssertionError(highest)


def unpacked(text: str) -> npt.NDArray[Any]:
    """Inverts `packed`.

    Raises:
        ValueError: If the text does not come from `packed`.
    """
    kind, _, content = text.partition(":")
    if kind != _PACKED_FLOATS and kind not in _ID_TYPES:
        raise ValueError(f"packed numbers must start with one of {', '.join([*_ID_TYPES, _PACKED_FLOATS])}")
    try:
        array = np.frombuffer(base64.b64decode(content, validate=True), kind)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"packed numbers are damaged: {error}") from error
    return array if kind == _PACKED_FLOATS else array.astype(np.int32)


def _unpacked_if_text(value: Any) -> Any:
    return unpacked(value) if isinstance(value, str) else value


_ID_TYPES = {"<u1": 2**8 - 1, "<u2": 2**16 - 1, "<i4": _MAX_TOKEN_ID}
_PACKED_FLOATS = "<f4"
_PACKED_TYPES = {kind: np.dtype(kind) for kind in (*_ID_TYPES, _PACKED_FLOATS)}


class _Chunk:
    """Consecutive tokens that logs share. No log overwrites tokens that another log has written.

    Args:
        storage: Storage, replaced by a longer array when full; slices of `array`, its read-only view, are read-only.
        used: Number of tokens written.
        start: Position of the chunk's first token in the sequence.
        before: Chunk that holds the tokens before ``start``, or None.
    """

    __slots__ = ("array", "before", "start", "storage", "used")

    def __init__(self, storage: TokenIds, used: int, start: int = 0, before: _Chunk | None = None) -> None:
        self.used, self.start, self.before = used, start, before
        self.storage, self.array = storage, _read_only(storage[:])

    def append(self, new: TokenIds) -> None:
        used = self.used + len(new)
        if used > len(self.storage):
            grown = np.empty(max(64, used + used // _SPARE), np.int32)
            grown[: self.used] = self.storage[: self.used]
            self.storage, self.array = grown, _read_only(grown[:])
        self.storage[self.used : used] = new
        self.used = used

    def up_to(self, length: int) -> _Chunk:
        """Returns the chunk with the last of ``length`` tokens: this one, or one before it."""
        chunk = self
        while length <= chunk.start and chunk.before is not None:
            chunk = chunk.before
        return chunk

    def read(self, start: int, stop: int) -> TokenIds:
        """Returns tokens ``[start, stop)`` as a read-only array: a view if one chunk holds them all."""
        chunk = self if start >= self.start else self.up_to(stop)
        if start >= chunk.start:
            return chunk.array[start - chunk.start : stop - chunk.start]
        parts = [chunk.array[: stop - chunk.start]]
        while start < chunk.start and chunk.before is not None:
            end, chunk = chunk.start, chunk.before.up_to(chunk.start)
            parts.append(chunk.array[max(start - chunk.start, 0) : end - chunk.start])
        return _read_only(np.concatenate(parts[::-1]))


class TokenSpan:
    """Tokens of a log, joined whenever they are read, so that branches share the memory of their common prefix."""

    __slots__ = ("_chunk", "_start", "_stop")

    def __init__(self, chunk: _Chunk, start: int, stop: int) -> None:
        self._chunk = chunk if start >= chunk.start else chunk.up_to(stop)
        self._start, self._stop = start, stop

    def read(self) -> TokenIds:
        """Returns the tokens as a read-only array."""
        return self._chunk.read(self._start, self._stop)

    def __len__(self) -> int:
        return self._stop - self._start

    def __array__(self, *_: object, **__: object) -> TokenIds:
        return self.read()

    def __repr__(self) -> str:
        return repr(self.read())

    def __reduce__(self) -> tuple[Any, ...]:
        return (token_ids, (self.read(),))


class SpanField:
    """Attribute for a field of a record that may store a span; reading the attribute returns the array."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, record: Any, _: type) -> TokenIds:
        value = None if record is None else record.__dict__.get(self._name)
        if value is None:
            raise AttributeError(self._name)
        return value.read() if type(value) is TokenSpan else value

    def __set__(self, record: Any, value: Any) -> None:  # without it, the record's dictionary would take precedence
        record.__dict__[self._name] = value


def _span_or_ids(value: Any) -> Any:
    return value if type(value) is TokenSpan else token_ids(value)


TokenSpanField = Annotated[TokenIds, PlainValidator(_span_or_ids), PlainSerializer(_to_list)]


class TokenLog:
    """A growing token sequence that hands out its parts.

    The prompts of a 100-turn conversation are prefixes of one sequence, so all steps together need memory linear in its
    length. If several logs continue one prefix, the first to grow uses the same storage, and so does every other log
    as long as it grows by the same tokens. Tokens that differ get separate storage.
    """

    __slots__ = ("_chunk", "_length")

    def __init__(self, tokens: Sequence[int] | TokenIds = ()) -> None:
        first = _checked_ids(tokens)
        self._length = len(first)
        array = _EMPTY_IDS
        if self._length:  # with space for a completion and a short reply
            array = np.empty(self._length + max(64, self._length // _SPARE), np.int32)
            array[: self._length] = first
        self._chunk = _Chunk(array, self._length)

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return (TokenLog, (self.ids,))

    @property
    def ids(self) -> TokenIds:
        """All tokens, as a read-only array: a view, unless they are spread over several chunks."""
        return self._chunk.read(0, self._length)

    def prefix(self, length: int) -> TokenLog:
        """Returns a log of the first ``length`` tokens, which shares their memory however it grows."""
        if not 0 <= length <= self._length:
            raise self._outside(0, length)
        log = TokenLog.__new__(TokenLog)
        log._chunk, log._length = self._chunk.up_to(length), length
        return log

    @classmethod
    def up_to(cls, last: TokenSpan) -> TokenLog:
        """Returns a log that ends with ``last``, and shares the memory of all tokens however it grows."""
        log = cls.__new__(cls)
        log._chunk, log._length = last._chunk, last._stop
        return log

    def extend(self, tokens: Sequence[int] | TokenIds) -> None:
        """Appends tokens. Earlier views do not change."""
        self.extend_checked(_checked_ids(tokens))

    def extend_checked(self, new: TokenIds) -> None:
        """Appends ids that `token_ids` has checked."""
        chunk, end = self._chunk, self._length - self._chunk.start
        if chunk.used == end and len(new):
            chunk.append(new)
        elif not starts_with(chunk.array[end : chunk.used], new):
            self._chunk = _Chunk(new.copy(), len(new), self._length, chunk)
        self._length += len(new)

    def view(self, start: int, stop: int) -> TokenIds:
        """Returns tokens ``[start, stop)`` like `ids`."""
        if not 0 <= start <= stop <= self._length:
            raise self._outside(start, stop)
        return self._chunk.read(start, stop)

    def span(self, start: int, stop: int) -> Any:
        """Returns tokens ``[start, stop)`` as a `TokenSpan`, for a field that shows the span as an array."""
        if not 0 <= start <= stop <= self._length:
            raise self._outside(start, stop)
        return TokenSpan(self._chunk, start, stop)

    def _outside(self, start: int, stop: int) -> IndexError:
        return IndexError(f"[{start}, {stop}) is outside a sequence of {self._length} tokens")


def starts_with(tokens: Sequence[int] | TokenIds, prefix: Sequence[int] | TokenIds) -> bool:
    """Whether ``tokens`` starts with ``prefix``, token for token."""
    length = len(prefix)
    if length > len(tokens):
        return False
    if length < _COMPARED_AS_BYTES and is_id_array(tokens) and is_id_array(prefix):
        return tokens[:length].tobytes() == prefix.tobytes()
    return bool(np.array_equal(tokens[:length], prefix))
