"""Calls of the methods of a parser, with checks of what they returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllm_core.errors import RefusedConversation
from rllm_core.parser.completion import ParsedCompletion
from rllm_core.parser.contract import ParserInterface
from rllm_core.types import MessageLike, TokenIds, is_id_array, token_ids


def rendered(parser: ParserInterface, messages: Sequence[MessageLike], **options: Any) -> TokenIds:
    """Returns ``(tokens,)`` ids of a prompt from `ParserInterface.render`.

    Raises:
        RefusedConversation: If the parser returned something else, or no ids.
    """
    ids = checked_ids(parser, "render", parser.render(messages, **options))
    if len(ids) == 0:
        raise RefusedConversation(f"parser {parser.name!r}: render() returned no token ids")
    return ids


def checked_ids(parser: ParserInterface, method: str, returned: Any) -> TokenIds:
    """Returns what a method returned as an array of token ids.

    Raises:
        RefusedConversation: If it is something else.
    """
    try:
        return returned if is_id_array(returned) else token_ids(returned)
    except (TypeError, ValueError) as error:
        raise RefusedConversation(
            f"parser {parser.name!r}: {method}() returned {returned!r:.80}, not token ids: {error}"
        ) from error


def parsed(parser: ParserInterface, completion_ids: TokenIds, **options: Any) -> ParsedCompletion:
    """Returns a completion from `ParserInterface.parse_completion`.

    Raises:
        RefusedConversation: If the parser returned something else.
    """
    found: object = parser.parse_completion(completion_ids, **options)
    if not isinstance(found, ParsedCompletion):
        raise RefusedConversation(
            f"parser {parser.name!r}: parse_completion() returned {found!r:.80}, not ParsedCompletion"
        )
    return found


def control_tokens(parser: ParserInterface, messages: Sequence[MessageLike]) -> int:
    """Returns the number from `ParserInterface.count_control_tokens`.

    Raises:
        RefusedConversation: If the parser returned something else.
    """
    counted: object = parser.count_control_tokens(messages)
    if type(counted) is not int or counted < 0:
        raise RefusedConversation(
            f"parser {parser.name!r}: count_control_tokens() must return an integer >= 0, got {counted!r}"
        )
    return counted
