"""First prompts of conversations, which the rollouts of a group share, so that each is rendered and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from rllm_core.parser.checked_calls import control_tokens, rendered
from rllm_core.parser.contract import ParserInterface
from rllm_core.types import FrozenList, MessageView, PlacedMedia, SampledMessage, TokenIds, token_ids


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class FirstPrompt:
    """What a parser returned for the first messages of a conversation.

    Attributes:
        parser: The parser.
        token_ids: ``(prompt_tokens,)`` ids.
        media: Media in the prompt, in order.
        control_tokens: How often the messages spell a control token.
    """

    parser: ParserInterface
    token_ids: TokenIds
    media: tuple[PlacedMedia, ...]
    control_tokens: int


# A prompt stays as long as a session refers to it. It refers to its parser, whose id is therefore not used again.
_prompts: WeakValueDictionary[tuple[int, str], FirstPrompt] = WeakValueDictionary()


def first_prompt(parser: ParserInterface, messages: MessageView, tools: FrozenList | None) -> FirstPrompt:
    """Returns the prompt of a new conversation: that of a session with the same parser, messages and tools, if any.

    Raises:
        RefusedConversation: If the parser refuses the messages, or returned something that is no prompt.
    """
    said = messages[:]
    if SampledMessage in map(type, said):  # the prompt also depends on the tokens that were sampled
        return _opened(parser, messages, tools)
    key = (id(parser), repr((said, tools)))  # the text tells 1 from True, and shows the order of keys
    found = _prompts.get(key)
    if found is None:
        found = _prompts[key] = _opened(parser, messages, tools)
    return found


def _opened(parser: ParserInterface, messages: MessageView, tools: FrozenList | None) -> FirstPrompt:
    ids = token_ids(rendered(parser, messages, tools=tools))
    media = parser.place_media(ids, messages)
    return FirstPrompt(parser, ids, media, control_tokens(parser, messages))
