"""Checks whether a chat template can be the one that the model was trained with."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rllm_renderers.probes import QUESTION
from rllm_renderers.template import ChatTemplate

_ANSWER, _NEXT = "sentinel0of0an0answer", "sentinel0of0a0question"
_MARKER = re.compile(r"<\|[^|<>\s]+\|>")
_SHOWN = 40


def complaints(template: ChatTemplate) -> Iterator[str]:
    """Yields problems of a template; nothing if it fits its model, or accepts no such conversation."""
    answered = [QUESTION, {"role": "assistant", "content": _ANSWER}]
    try:
        ended = template.text(answered, add_generation_prompt=False)
        text = template.text([*answered, {"role": "user", "content": _NEXT}])
    except ValueError:
        return
    known = template.encoder.control_tokens
    own = [token for token in known if _MARKER.fullmatch(token)]
    strange = list(dict.fromkeys(marker for marker in _MARKER.findall(text) if marker not in known))
    if strange and own and not any(token in text for token in own):
        yield (
            f"the chat template is of another model: it writes {', '.join(strange[:3])}, which are no tokens of this "
            f"model; its own are {', '.join(own[:3])}"
        )
        return
    # Some templates end an answer with a stop token only if it is the last message or a call; for others, the start of
    # the next message is the stop token.
    following = [_after_answer(one).partition(_NEXT)[0] for one in (ended, text)]
    source = str(template.tokenizer.chat_template)
    if _ANSWER in text and not any(template.first_stop(one, 0) for one in (*following, source)):
        names = ", ".join(template.tokenizer.convert_ids_to_tokens(list(template.stop_token_ids)))
        yield (
            f"the chat template ends an answer without a stop token of the model ({names}): "
            f"{following[-1][:_SHOWN]!r} follows it. Either the template is wrong, or eos_token_id in "
            "generation_config.json lacks the token that ends an answer"
        )


def _after_answer(text: str) -> str:
    return text.partition(_ANSWER)[2]
