"""Tokens and loss masks of example conversations, equal to those of a rollout with the same parser.

A dataset of conversations is trained like rollouts, as if the model had sampled the assistant messages. Conversations
therefore become tokens by the same rules in supervised training and in RL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rllm_core.errors import ConfigError
from rllm_core.parser.contract import MaskMethod, ParserInterface, ToolSpec
from rllm_core.parser.segments import Turn
from rllm_core.parser.session import ParserSession
from rllm_core.types import MessageLike, Messages, PlacedMedia, TokenIds, freeze, starts_with, token_ids


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """One row of supervised data.

    Attributes:
        token_ids: ``(tokens,)`` int32, read-only.
        loss_mask: ``(tokens,)`` bool, True on target tokens; read-only.
        media: Media such as images; ``token_ids`` holds placeholders for them.
        break_reason: Why the conversation could not continue in the previous row, if it started there.
    """

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    media: tuple[PlacedMedia, ...] = ()
    break_reason: str | None = None

    def __post_init__(self) -> None:
        mask = np.array(self.loss_mask, np.bool_)
        mask.setflags(write=False)
        object.__setattr__(self, "token_ids", token_ids(self.token_ids))
        object.__setattr__(self, "loss_mask", mask)
        if self.token_ids.shape != mask.shape:
            raise ValueError(f"a loss mask of {mask.size} for {len(self.token_ids)} tokens")


def tokenize_and_mask(
    parser: ParserInterface,
    messages: Sequence[MessageLike],
    *,
    tools: Sequence[ToolSpec] | None = None,
    method: MaskMethod = "cumulative",
) -> list[MaskedTokens]:
    """Implements `rllm_core.parser.BaseParser.tokenize_and_mask`."""
    if method not in ("cumulative", "stepwise"):
        problem = "requires parser 'chat_template'" if method == "hf_template" else "is not a method"
        raise ConfigError(f"parser {parser.name!r} supports 'cumulative' and 'stepwise'; {method!r} {problem}")
    learned = _learned(Messages(messages))
    conversation = Messages([{key: message[key] for key in message if key != "weight"} for message in messages])
    if method == "stepwise":
        return [_alone(parser, conversation, index, tools) for index in learned if learned[index]]
    return _as_rolled_out(parser, conversation, learned, tools)


def _learned(messages: Sequence[MessageLike]) -> dict[int, bool]:
    """Maps the index of every assistant message to whether it is a target."""
    learned = {}
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise ConfigError(f"message {index}: weight = {weight!r} must be 0 or 1")
        learned[index] = bool(weight)
    if not any(learned.values()):
        with_weight = " with a weight of 1" if learned else ""
        raise ConfigError(
            f"the conversation has no message of role 'assistant'{with_weight}, so there is nothing to learn from"
        )
    return learned


def _alone(
    parser: ParserInterface, conversation: Messages, index: int, tools: Sequence[ToolSpec] | None
) -> MaskedTokens:
    """Returns the row of one assistant message, with the template's rendering of everything before it as prompt."""
    before = conversation[:index]
    prompt = token_ids(parser.render(before, tools=tools))
    ids = np.concatenate([prompt, _completion(parser, conversation, index, prompt, tools)])
    return MaskedTokens(ids, np.arange(len(ids)) >= len(prompt), parser.place_media(prompt, before))


class _WrittenSession(ParserSession):
    """A session for example conversations. It keeps the given messages instead of parsing them from tokens."""

    def record_written(self, completion_ids: TokenIds, message: MessageLike) -> None:
        """Like `record`, but the conversation continues with ``message``."""
        self.record(completion_ids)
        self._answer = freeze(message)


def _as_rolled_out(
    parser: ParserInterface, conversation: Messages, learned: Mapping[int, bool], tools: Sequence[ToolSpec] | None
) -> list[MaskedTokens]:
    """Returns one row per unbroken token sequence of a rollout that would sample these assistant messages."""
    session = _WrittenSession(parser, tools=tools)
    turns: list[Turn] = []
    for index in learned:
        turns.append(session.next_prompt(conversation[:index]))
        # Take a message's tokens from a freshly rendered prompt: a bridged one may contain reasoning that the template
        # drops, and then no rendering starts with it.
        rendered = token_ids(parser.render(conversation[:index], tools=tools))
        session.record_written(_completion(parser, conversation, index, rendered, tools), conversation[index])
    flags, rows = iter(learned.values()), []
    for number, segment in enumerate(session.segments):
        mask = np.zeros(len(segment.token_ids), np.bool_)
        for start, stop in segment.completion_spans:
            mask[start:stop] = next(flags)
        if mask.any():
            of_segment = [turn for turn in turns if turn.segment == number]
            rows.append(MaskedTokens(segment.token_ids, mask, of_segment[-1].media, of_segment[0].break_reason))
    return rows


def _completion(
    parser: ParserInterface, conversation: Messages, index: int, prompt: TokenIds, tools: Sequence[ToolSpec] | None
) -> TokenIds:
    """Returns the tokens that an assistant message adds to its prompt, up to and including the stop token."""
    whole = token_ids(parser.render(conversation[: index + 1], tools=tools, add_generation_prompt=False))
    if not starts_with(whole, prompt):
        before = parser.render(conversation[:index], tools=tools, add_generation_prompt=False)
        if starts_with(whole, token_ids(before)):
            raise ConfigError(
                f"message {index}: the rendered conversation does not start with the prompt for this message. The "
                "prompt already starts the completion (often its reasoning), but the template drops that part from "
                "given messages. Use a copy of the model folder whose chat_template.jinja writes reasoning_content as "
                "the model samples it, turn reasoning off with a template variable "
                "(chat_template.chat_template_kwargs), or remove white space from the start of the message"
            )
        raise ConfigError(
            f"message {index}: the rendered conversation does not start with the prompt for this message, so its "
            "tokens cannot be separated. Common causes: leading white space; missing or misplaced reasoning"
        )
    stop_ids = parser.get_stop_token_ids()
    added = whole[len(prompt) :]
    stops = np.flatnonzero(np.isin(added, stop_ids))
    if not len(stops):
        opener = _opener(parser, conversation, index, whole, tools)
        if opener not in stop_ids:
            raise ConfigError(f"message {index}: its rendering has no stop token, so the model would not learn to stop")
        return np.append(added, np.int32(opener))
    # Templates may write two stop tokens in a row. With other text in between, the message itself spells one.
    if np.any(np.diff(stops) > 1):
        raise ConfigError(f"message {index}: its text spells a stop token, which would end the message early")
    return added[: stops[0] + 1]


def _opener(
    parser: ParserInterface, conversation: Messages, index: int, whole: TokenIds, tools: Sequence[ToolSpec] | None
) -> int | None:
    """Returns the first token of the message after an assistant's; some model families stop by sampling it."""
    following = conversation[index + 1 : index + 2]
    if not following:
        calls = conversation[index].get("tool_calls")
        answer = {"role": "tool", "tool_call_id": calls[0].get("id"), "content": ""} if calls else None
        following = [freeze(answer or {"role": "user", "content": ""})]
    longer = token_ids(
        parser.render([*conversation[: index + 1], *following], tools=tools, add_generation_prompt=False)
    )
    return int(longer[len(whole)]) if starts_with(longer, whole) and len(longer) > len(whole) else None
