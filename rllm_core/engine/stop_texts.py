"""Texts that end a completion: tokens that the engine sampled after one of them are cut off."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from rllm_core.engine.contract import RolloutEngine
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, ToolSpec
from rllm_core.types import FinishReason, ModelOutput, TokenIds, TokenOutput


def tokens_up_to_stop_text(parser: BaseParser, output: TokenOutput, texts: tuple[str, ...]) -> TokenOutput:
    """Cuts a completion after the token that completes one of ``texts``."""
    tokens = _tokens(parser, output.token_ids, texts) if texts else None
    if tokens is None:
        return output
    return output.model_copy(update={"token_ids": output.token_ids[:tokens], **_shortened(output, tokens)})


def message_up_to_stop_text(
    engine: RolloutEngine, output: ModelOutput, texts: tuple[str, ...], tools: Sequence[ToolSpec] | None
) -> ModelOutput:
    """`tokens_up_to_stop_text` for the output of an engine that returns messages.

    Raises:
        ConfigError: If there are stop texts, but the engine has no parser.
    """
    if not texts:
        return output
    if engine.parser is None:
        raise ConfigError(f"stop texts need a parser, and engine {engine.name!r} has none")
    tokens = _tokens(engine.parser, output.completion_ids, texts)
    if tokens is None:
        return output
    ids = output.completion_ids[:tokens]
    said = engine.parser.parse_completion(ids, prompt_ids=output.prompt_ids, tools=tools).to_message()
    return output.model_copy(update={"completion_ids": ids, "message": said, **_shortened(output, tokens)})


def _tokens(parser: BaseParser, completion: TokenIds, texts: tuple[str, ...]) -> int | None:
    """Returns how many tokens complete the first stop text; None if there is none."""

    def has_one(tokens: int) -> bool:
        said = parser.decode(completion[:tokens])
        return any(text in said for text in texts)

    if not has_one(len(completion)):
        return None
    return 1 + bisect.bisect_left(range(1, len(completion) + 1), True, key=has_one)


def _shortened(output: TokenOutput | ModelOutput, tokens: int) -> dict[str, object]:
    """Returns the fields of an output that change besides its tokens when it is cut."""
    logprobs = None if output.logprobs is None else output.logprobs[:tokens]
    return {"logprobs": logprobs, "finish_reason": FinishReason.STOP}
