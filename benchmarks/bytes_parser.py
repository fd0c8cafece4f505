"""A parser of bytes whose own cost does not hide that of what is measured."""

from __future__ import annotations

from collections.abc import Sequence

from rllm_core.parser import Appended, ToolSpec
from rllm_core.types import MessageLike, TokenIds
from rllm_devkit.scripted import ByteParser


class Bytes(ByteParser):
    """Continues a prompt without a loop over all of its tokens."""

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> Appended:
        """See `BaseParser.bridge_to_next_turn`."""
        return Appended(prompt_ids, completion_ids, self.render(new_messages, tools=tools))
