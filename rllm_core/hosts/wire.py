"""Messages between a run and its workers, and their encoding as bytes; docs/worker-protocol.md explains them.

A frame is a length of four bytes, big-endian, followed by that many bytes of MessagePack: an array of messages. All
messages sent in one tick of an event loop form one frame. A message is a map with its ``type`` and its fields; a field
that has its default value may be left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.msgpack import Ext

# This module names every message, for its users.
from rllm_core.hosts.messages_of_run import *  # noqa: F403
from rllm_core.hosts.messages_of_run import FromRun
from rllm_core.hosts.messages_of_worker import *  # noqa: F403
from rllm_core.hosts.messages_of_worker import FromWorker

VERSION = 1
MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")
_BIG_INTEGER = 1  # extension type: JSON has integers of more than 64 bits, MessagePack does not

_encoder = msgspec.msgpack.Encoder()


def encoded(messages: list[Any]) -> bytes:
    """Encodes messages as the content of a frame.

    Raises:
        TypeError: If a field holds anything but JSON data and bytes.
    """
    try:
        return _encoder.encode(messages)
    except OverflowError:
        return _encoder.encode(_without_big_integers(msgspec.to_builtins(messages, builtin_types=(bytes,))))


def _without_big_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_big_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_big_integers(item) for item in value]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return Ext(_BIG_INTEGER, str(value).encode())
    return value


def _extension(code: int, data: memoryview) -> Any:
    if code != _BIG_INTEGER:
        raise ValueError(f"extension type {code} is unknown")
    return int(bytes(data))


decode_from_run = msgspec.msgpack.Decoder(list[FromRun], ext_hook=_extension).decode
decode_from_worker = msgspec.msgpack.Decoder(list[FromWorker], ext_hook=_extension).decode


def frame(content: bytes) -> bytes:
    """Returns a frame: the content preceded by its length."""
    return _LENGTH.pack(len(content)) + content


class Frames:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds bytes, and yields the content of each complete frame.

        Raises:
            ValueError: If a frame is larger than `MAX_FRAME_BYTES`.
        """
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(
                    f"it wrote {bytes(received[start : start + 40])!r} where a message starts, whose length is at most "
                    f"{MAX_FRAME_BYTES:,}; print to standard error"
                )
            end = start + _LENGTH.size + length
            if len(received) < end:
                break
            yield bytes(received[start + _LENGTH.size : end])
            start = end
        del received[:start]
