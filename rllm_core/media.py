"""Media in prompts, such as images: chunks that occupy token positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field

from rllm_core.records import Count, Name, Record
from rllm_core.tokens import TokenIds, token_ids


class MediaChunk(Record):
    """A non-text piece of a prompt, which occupies ``length_tokens`` positions.

    Text-only engines and parsers reject it up front, with a specific error (see `text_only`).

    Attributes:
        sha256: Hash of ``content``; identifies the chunk where the content is not available.
        kind: Kind of media, such as ``"image"``.
        length_tokens: Number of positions it occupies.
        content: The encoded file, shared in memory and never written to JSON. None if the record was read from JSON.
    """

    model_config = ConfigDict(frozen=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    kind: Name
    length_tokens: Annotated[int, Field(strict=True, ge=1)]
    content: Annotated[bytes | None, Field(exclude=True, repr=False)] = None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.model_dump() == other.model_dump()  # without ``content``

    def __hash__(self) -> int:
        return hash((self.sha256, self.kind, self.length_tokens))


class PlacedMedia(MediaChunk):
    """Media at a position of a prompt: placeholders fill ``[start, start + length_tokens)``."""

    start: Count

    @property
    def stop(self) -> int:
        """First position after the chunk."""
        return self.start + self.length_tokens


TokenInput = Sequence[int | MediaChunk] | TokenIds


def text_only(tokens: TokenInput, provider: str) -> TokenIds:
    """Returns ``tokens`` as an array of ids.

    Raises:
        ValueError: If they contain media; the message names ``provider``, which takes text only.
    """
    if not isinstance(tokens, np.ndarray):
        for token in tokens:
            if isinstance(token, MediaChunk):
                raise ValueError(f"{provider} takes text only, but the prompt holds a chunk of kind {token.kind!r}")
    return token_ids(tokens)  # type: ignore[arg-type]


def with_media(prompt_ids: TokenIds, media: Sequence[PlacedMedia]) -> TokenInput:
    """Returns a prompt in the form that engines take: media chunks replace their placeholders."""
    if not media:
        return prompt_ids
    mixed: list[int | MediaChunk] = []
    position = 0
    for piece in media:
        mixed += prompt_ids[position : piece.start].tolist()
        mixed.append(piece)
        position = piece.stop
    return [*mixed, *prompt_ids[position:].tolist()]
