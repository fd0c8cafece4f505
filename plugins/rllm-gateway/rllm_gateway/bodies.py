"""Reads request bodies, without parsing or hashing the part that a body repeats from an earlier one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rllm_gateway.errors import BadRequest
from rllm_gateway.history import History

KEPT_BODIES = 16
DIGEST_BYTES = 16

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Form:
    """Where the requests of an interface carry the conversation.

    Attributes:
        interface: Path of the interface.
        name: Name of the field with the list of messages.
        leading: Returns the normalized messages that other fields add at the start.
        messages: Returns the normalized messages of the list.
    """

    interface: str
    name: str
    leading: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
    messages: Callable[[Any], list[dict[str, Any]]]


@dataclass(slots=True)
class _Known:
    """A body up to the end of its last message; the next body of the same conversation starts with these bytes.

    Attributes:
        form: Where the body carries the conversation.
        start: The bytes, as a view, because copying them would take longer than everything else.
        hashed: Hash object of these bytes, which can be continued with more.
        fields: Fields before the list of messages.
        leading: See `Form`.
        history: The conversation.
    """

    form: Form
    start: memoryview
    hashed: Any
    fields: dict[str, Any]
    leading: list[dict[str, Any]]
    history: History


@dataclass(frozen=True, slots=True)
class Read:
    """A parsed body.

    Attributes:
        fields: All fields but the list of messages.
        history: The conversation.
        digest: Hash of the body.
    """

    fields: dict[str, Any]
    history: History
    digest: bytes


class Bodies:
    """Reads the request bodies of one rollout.

    Clients send the whole conversation again in every turn, so most bodies start with all bytes of an earlier one, up
    to the end of its last message. Comparing bytes is far cheaper than parsing them. A body is parsed as a whole if its
    client changed anything that it had sent before.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def read(self, form: Form, body: bytes) -> Read:
        """Reads a body.

        Raises:
            BadRequest: If the body is not a JSON object, or a message is invalid.
        """
        starts = [known for known in self._known if known.form is form and body.startswith(known.start)]
        longest = max(starts, key=lambda known: len(known.start), default=None)
        found = None if longest is None else self._continued(longest, body)
        return found or self._whole(form, body)

    def _continued(self, known: _Known, body: bytes) -> Read | None:
        """Reads a body that starts like a known one; returns None if the whole body must be parsed."""
        rest = body[len(known.start) :].lstrip()
        added = rest.removeprefix(b",")
        if rest[:1] not in (b",", b"]") or (added is not rest and added.lstrip()[:1] == b"]"):
            return None
        opening = b'{"%s":[' % known.form.name.encode()
        fields, listed = _split(opening + added, known.form.name)
        if listed is None or not added.startswith(listed[1:]):  # the body has this field twice
            return None
        fields = known.fields | fields
        if known.form.leading(fields) != known.leading:
            return None
        items = _decoded(listed)
        messages = known.form.messages(items) if items else []
        history, end = known.history, len(known.start)
        if messages:
            history, end = history.extended(messages), len(body) - len(added) + len(listed) - 2
        digest = known.hashed.copy()
        digest.update(body[len(known.start) : end])
        if messages and messages[-1]["role"] != "assistant":
            self._known.remove(known)
            self._keep(_Known(known.form, memoryview(body)[:end], digest.copy(), known.fields, known.leading, history))
        digest.update(body[end:])
        return Read(fields, history, digest.digest())

    def _whole(self, form: Form, body: bytes) -> Read:
        fields, listed = _split(body, form.name)
        leading = form.leading(fields)
        messages = form.messages(None if listed is None else _decoded(listed))
        history, end = History([*leading, *messages]), 0
        digest = hashlib.blake2b(form.interface.encode(), digest_size=DIGEST_BYTES)
        # Items of one answer must be read together, so a body that ends with an answer is not kept.
        if listed is not None and listed[:1] == b"[" and messages and messages[-1]["role"] != "assistant":
            start = body.find(listed)
            before = _fields_before(body[:start], form.name)
            if before is not None:
                end = start + len(listed) - 1
                digest.update(body[:end])
                self._keep(_Known(form, memoryview(body)[:end], digest.copy(), before, leading, history))
        digest.update(body[end:])
        return Read(fields, history, digest.digest())

    def _keep(self, known: _Known) -> None:
        self._known.append(known)
        del self._known[:-KEPT_BODIES]


def _split(body: bytes, name: str) -> tuple[dict[str, Any], bytes | None]:
    """Returns all fields of a body but one, and the JSON text of that field."""
    try:
        found = _fields(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error}") from error
    listed = found.pop(name, None)
    return {one: _decoded(value) for one, value in found.items()}, None if listed is None else bytes(listed)


def _decoded(value: msgspec.Raw | bytes) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _fields_before(start: bytes, name: str) -> dict[str, Any] | None:
    """Returns the fields before the value of field ``name``, if ``start`` ends with that field's name."""
    try:
        fields, value = _split(start + b"[]}", name)
    except BadRequest:  # an earlier field holds the same list
        return None
    return fields if value == b"[]" else None
