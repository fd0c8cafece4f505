"""Detects the tool-call format of a template: it renders an artificial call, and a format must parse it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rllm_renderers.formats.deepseek import DeepSeek
from rllm_renderers.formats.glm import Glm
from rllm_renderers.formats.harmony import Harmony
from rllm_renderers.formats.hermes import Hermes
from rllm_renderers.formats.llama import Llama
from rllm_renderers.formats.mistral import Mistral
from rllm_renderers.formats.qwen_xml import QwenXml
from rllm_renderers.formats.tool_format import NoCalls, ToolFormat, schemas_of
from rllm_renderers.probes import ARGUMENTS, NAME, QUESTION, SAYINGS, TOOL, answer

if TYPE_CHECKING:
    from rllm_renderers.template import Template

# Formats with unmistakable marks first.
FORMATS: dict[str, ToolFormat] = {
    known.name: known for known in (QwenXml(), Glm(), Hermes(), DeepSeek(), Mistral(), Harmony(), Llama())
}
_THOUGHT = "thought0of0a0model"
_TAG_BEFORE = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*$")
_TAG_AFTER = re.compile(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\])")


@dataclass(frozen=True)
class _Written:
    """A rendered answer.

    Attributes:
        text: Text of the answer, from its first difference from the prompt.
        before: Text before ``text``.
        header: Part of the prompt that ``text`` may repeat.
    """

    text: str
    before: str
    header: str


def tool_format(template: Template, among: Sequence[ToolFormat] = tuple(FORMATS.values())) -> ToolFormat:
    """Returns the tool-call format of a template, with its tags around calls and reasoning.

    The format must parse an artificial call, alone or next to text, without leftovers. If the template writes no
    calls, the marks in its source decide. Returns `NoCalls` if there are no marks, or if calls have an unknown form.
    """
    tags = _reasoning_tags(template)
    calls = [*_written(template, "", 1), *_written(template, SAYINGS[0], 1)]
    for written in calls:
        for known in among:
            for variant in (known, *known.variants(written.text)):
                found = variant if tags is None else variant.with_reasoning_tags(tags)
                if _reads(found, written):
                    return found.as_written(written.text)
    source = str(template.tokenizer.chat_template)
    signs = [known for known in among if any(map(source.__contains__, known.signs))]
    found = NoCalls() if any(NAME in written.text for written in calls) or not signs else signs[0]
    return found if tags is None else found.with_reasoning_tags(tags)


def _reads(known: ToolFormat, written: _Written) -> bool:
    parsed = known.read(
        written.text, stopped=True, opened_by_prompt=known.opened_by(written.before), schemas=schemas_of([TOOL])
    )
    if [(call.name, call.arguments) for call in parsed.tool_calls if call.status == "ok"] != [(NAME, ARGUMENTS)]:
        return False
    # The end tag of reasoning that the prompt opened does not belong to the call.
    left_over = parsed.content.replace(SAYINGS[0], "", 1).replace(known.reasoning_tags[1], "").strip()
    return len(parsed.tool_calls) == 1 and left_over in written.header and not parsed.reasoning


def _written(template: Template, said: str, calls: int, reasoning: str = "") -> Iterator[_Written]:
    """Yields what the template writes for an answer, with and without its header."""
    asked = template.rendered_or_none([QUESTION], [TOOL], add_generation_prompt=False)
    prompt = template.rendered_or_none([QUESTION], [TOOL])
    message = answer(said, calls, said=str(ARGUMENTS["key"]))
    if reasoning:
        message["reasoning_content"] = reasoning
    whole = template.rendered_or_none([QUESTION, message], [TOOL], add_generation_prompt=False)
    plain = template.rendered_or_none([QUESTION, answer(SAYINGS[0])], [TOOL], add_generation_prompt=False)
    if asked is None or prompt is None or whole is None:
        return
    closing = "" if plain is None else plain.rpartition(SAYINGS[0])[2].strip()
    for before in (prompt, asked):
        pairs = zip(before, whole, strict=False)
        begin = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(whole)))
        stop = template.first_stop(whole, begin)
        text = whole[begin : stop[0] if stop is not None else None].rstrip()
        header = prompt[begin:] if before is asked else ""
        yield _Written(text.removesuffix(closing), whole[:begin], header)


def _reasoning_tags(template: Template) -> tuple[str, str] | None:
    """Returns the tags around an answer's reasoning, or None if the template writes no reasoning, or no tags."""
    plain = [written.before + written.text for written in _written(template, SAYINGS[0], 0)]
    for written in [*_written(template, SAYINGS[0], 0, _THOUGHT), *_written(template, SAYINGS[0], 1, _THOUGHT)]:
        before, thought, rest = (written.before + written.text).partition(_THOUGHT)
        begin, end = _TAG_BEFORE.search(before), _TAG_AFTER.match(rest)
        if thought and begin is not None and end is not None:
            always = any(text.partition(SAYINGS[0])[0].rstrip().endswith(begin[1]) for text in plain)
            return None if always else (begin[1], end[1])
    return None
