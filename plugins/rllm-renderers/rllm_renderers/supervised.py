"""Supervised data masked by the chat template's own ``{% generation %}`` and ``{% endgeneration %}`` markers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rllm_core.errors import ConfigError
from rllm_core.parser import MaskedTokens, ToolSpec
from rllm_core.types import MessageLike
from rllm_renderers.template import ChatTemplate

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def masked_by_template(
    template: ChatTemplate, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None
) -> MaskedTokens:
    """Returns one row for the whole conversation, tokenized and masked by transformers.

    Raises:
        ConfigError: If the template has no markers, or marks nothing in this conversation. transformers would only
            warn, and mask everything.
    """
    tokenizer = template.tokenizer
    offered = [dict(tool) for tool in tools] if tools else None
    if not _GENERATION.search(tokenizer.get_chat_template(tools=offered)):
        raise ConfigError(
            "hf_template: the chat template has no {% generation %} around assistant messages; use cumulative or "
            "stepwise"
        )
    for index, message in enumerate(messages):
        if "weight" in message:
            raise ConfigError(
                f"message {index}: hf_template masks by role and does not support weights; use cumulative"
            )
    rendered = tokenizer.apply_chat_template(
        [template.for_template(dict(message)) for message in messages],
        tools=offered,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **template.variables,
    )
    row = MaskedTokens(rendered["input_ids"], rendered["assistant_masks"])
    if not row.loss_mask.any():
        raise ConfigError("hf_template: the chat template marks no part of this conversation as the assistant's")
    return row
