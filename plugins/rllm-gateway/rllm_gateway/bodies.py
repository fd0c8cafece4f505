"""Reads the bodies of requests: what a body repeats of an earlier one is neither parsed nor hashed again."""

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
    """Where an interface has its conversation.

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
    """The start of a body up to the end of its last message, which the next body of the same conversation repeats.

    Attributes:
        form: Where it has its conversation.
        start: The bytes; a view, because to copy them would take longer than all else.
        hashed: Their hash, which can be continued.
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
    """A body.

    Attributes:
        fields: All fields but the list of messages.
        history: The conversation.
        digest: Hash of the body.
    """

    fields: dict[str, Any]
    history: History
    digest: bytes


class Bodies:
    """Reads the bodies of one rollout.

    A conversation is sent again in every turn, so a body mostly starts with all bytes of an earlier one, up to the end
    of its last message. Comparing bytes is far cheaper than reading them. The body of a client that changes what it has
    sent is read as a whole.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def read(self, form: Form, body: bytes) -> Read:
        """Reads a body.

        Raises:
            BadRequest: If it is no JSON object, or a message is wrong.
        """
        starts = [known for known in self._known if known.form is form and body.startswith(known.start)]
        longest = max(starts, key=lambda known: len(known.start), default=None)
        found = None if longest is None else self._continued(longest, body)
        return found or self._whole(form, body)

    def _continued(self, known: _Known, body: bytes) -> Read | None:
        """Reads a body that starts as a known one; None if it has to be read as a whole."""
        rest = body[len(known.start) :].lstrip()
        added = rest.removeprefix(b",")
        if rest[:1] not in (b",", b"]") or (added is not rest and added.lstrip()[:1] == b"]"):
            return None
        opening = b'{"%s":[' % known.form.name.encode()
        fields, listed = _split(opening + added, known.form.name)
        if listed is None or not added.startswith(listed[1:]):  # the field is there a second time
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
        # The items of one answer must not be read apart, so what ends with an answer is not kept.
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
    """Returns all fields of a body but one, and the JSON of that."""
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
    """Returns the fields before the value of a field, if ``start`` ends with the name of that field."""
    try:
        fields, value = _split(start + b"[]}", name)
    except BadRequest:  # the same list is also in another field before
        return None
    return fields if value == b"[]" else None
