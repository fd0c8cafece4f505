"""Parser ``tinker``: Tinker's renderers, from tinker-cookbook."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from rllm_core.errors import ConfigError
from rllm_core.parser import Appended, BaseParser, ParsedCompletion, ParsedToolCall, ToolSpec
from rllm_core.types import MessageLike, TokenIds, message, token_ids
from rllm_tinker.config import TinkerConfig
from rllm_tinker.parser_config import missing

try:
    from rllm_renderers.encoding import Encoder
    from rllm_renderers.formats.tool_format import Schemas, checked_call, schemas_of, termination
    from rllm_renderers.loading import load_tokenizer
    from rllm_renderers.probes import Tail, bridged_tails, names_calls
    from rllm_renderers.text_parser import bridged

    from rllm_tinker import cookbook
    from rllm_tinker.rendering import Rendering
except ImportError as error:  # rllm-renderers is part of the extra, too
    raise missing(error) from error

if TYPE_CHECKING:
    import tinker

UNCLOSED = "unclosed_block"
THINK, END_OF_THINKING = "<think>", "</think>"
# Start and end of reasoning in harmony, which has no such tags.
ANALYSIS, END_OF_ANALYSIS = "<|channel|>analysis<|message|>", "<|end|>"


class TinkerParser(BaseParser):
    """Renders prompts and parses completions with one of the cookbook's renderers.

    Bridging uses the suffix method of `rllm_renderers.text_parser`. It renders a short made-up conversation, and
    appends the tokens after its assistant message to the unchanged prompt and completion. It is on only for the kinds
    of tail in ``bridged_tails``: for these, the corpus of `rllm_renderers.probes` found it equal, token for token, to
    rendering the whole conversation. There is no bridge after unfinished reasoning, after a stop token that the
    renderer itself does not write, or if anything follows the stop token.

    Args:
        tokenizer: Fast tokenizer; the parser takes sole ownership.
        renderer: Name of a renderer of the cookbook.
        config: Section ``[tinker]`` of the run file.

    Attributes:
        renderer: Name of the renderer.
        bridged_tails: Kinds of tail that are bridged.
    """

    name: ClassVar[str] = "tinker"

    def __init__(self, tokenizer: Any, renderer: str, config: TinkerConfig | None = None) -> None:
        cookbook.load_cookbook()
        self.config = config or TinkerConfig()
        self.renderer = renderer
        self._tokenizer = tokenizer
        self._rendering = Rendering(renderer, tokenizer, Encoder(tokenizer))
        self.supports_tools = self._rendering.shows_tools
        self.bridged_tails: frozenset[Tail] = frozenset()
        if self.config.bridge:
            self.bridged_tails = bridged_tails(self._rendering, (THINK, END_OF_THINKING))
        self._names_calls = names_calls(self._rendering, self.bridged_tails)
        self.supports_bridge = bool(self.bridged_tails)

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> TinkerParser:
        """Selects the renderer, and loads a private tokenizer from a model folder or Hugging Face model ID.

        Raises:
            ConfigError: If the cookbook is missing or its version unsupported, the renderer cannot be determined, or
                the renderer cannot be used with the tokenizer.
        """
        section = TinkerConfig.model_validate({} if config is None else config)
        cookbook.load_cookbook()
        name = section.renderer
        if name == "auto":
            model = section.base_model or str(path)
            if Path(model).expanduser().is_dir():
                raise ConfigError(
                    f"tinker.renderer is auto, but the folder {model} does not name the renderer that its model was "
                    f"trained with; set it to one of {', '.join(cookbook.recommended_names())}"
                )
            name = cookbook.recommended_renderer(model)
        return cls(
            load_tokenizer(str(path), trust_remote_code=section.trust_remote_code, parser=cls.name), name, section
        )

    @property
    def tokenizer(self) -> Any:
        """The parser's private tokenizer."""
        return self._tokenizer

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """See `BaseParser.get_stop_token_ids`; the renderer's stop tokens."""
        return self._rendering.stop_token_ids

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """See `BaseParser.count_control_tokens`."""
        return self._rendering.encoder.count(messages)

    def describe(self) -> Mapping[str, Any]:
        """See `BaseParser.describe`; the renderer, and how its prompts compare with the model's chat template."""
        return {
            "renderer": self.renderer,
            "tinker-cookbook": importlib.metadata.version("tinker-cookbook"),
            "chat_template": self._rendering.compared_with_template(),
        }

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See `BaseParser.render`.

        Raises:
            ConfigError: If a message contains anything but text.
            Rejected: If the renderer rejects the conversation.
        """
        given = [message(one) for one in messages]
        return self._rendering.ids(given, tools, add_generation_prompt=add_generation_prompt)

    def build_prompt(
        self, messages: Sequence[MessageLike], *, tools: Sequence[ToolSpec] | None = None
    ) -> tinker.ModelInput:
        """`render` in the SDK's type; raises the same errors."""
        from tinker import ModelInput

        return ModelInput.from_ints(self.render(messages, tools=tools))

    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """See `BaseParser.parse_completion`; statuses are those of `rllm_renderers.formats.tool_format`.

        Renderers parse only whole completions, so a truncated one is parsed as if it had stopped there, and reported
        as truncated. ``prompt_ids`` are not needed: renderers know how their own prompts end.
        """
        sampled: list[int] = token_ids(completion_ids).tolist()
        stop = next((at for at, token in enumerate(sampled) if token in self._rendering.stop_token_ids), None)
        schemas = schemas_of(tools) if tools else None
        text = self._rendering.encoder.decode(sampled[:stop])
        found = self._rendering.read(sampled[:stop], None if stop is None else sampled[stop])
        if found is None:
            call = ParsedToolCall(None, None, text, "invalid_json")
            return ParsedCompletion("", tool_calls=(call,), termination=termination(stop is not None, (call,), None))
        said, is_clean = found
        content, reasoning = _content(said["content"])
        calls = _calls(said, schemas)
        if said.get("tool_calls") and said["content"] == text:
            content = ""  # some renderers repeat calls as content if there is nothing else
        for call in calls:
            content = content.removesuffix(call.raw) if call.status == UNCLOSED else content
        is_open, before, thought = _open_reasoning(text, self._rendering.opens_reasoning)
        if is_open and thought is not None:
            content, reasoning = before, thought
        if is_open:
            reasoning = reasoning or ""
        complete = None if reasoning is None else not is_open
        ending = termination(stop is not None, calls, complete)
        if stop is not None and not is_clean:
            ending = termination(True, (), False)
        return ParsedCompletion(content, reasoning, calls, ending, complete)

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> Appended | None:
        """See `BaseParser.bridge_to_next_turn`; the class docstring lists when there is no bridge."""
        tail = Tail.of(new_messages, tools)
        if not len(prompt_ids) or tail not in self.bridged_tails:
            return None
        completion = token_ids(completion_ids)
        parsed = self.parse_completion(completion, tools=tools)
        if parsed.reasoning_complete is False:
            return None
        called = None
        if self._names_calls and any(not one.get("name") for one in new_messages if one.get("role") == "tool"):
            names = {call.name for call in parsed.ok_tool_calls}
            if len(names) != 1:  # matching results to calls would be a guess
                return None
            [called] = names
        suffix = self._rendering.suffix(new_messages, tools, called)
        return None if suffix is None else bridged(prompt_ids, completion, suffix, self._rendering.stop_token_ids)


def _content(content: Any) -> tuple[str, str | None]:
    """Returns a message's text, and its reasoning, if any."""
    if isinstance(content, str):
        return content, None
    thoughts = [part["thinking"] for part in content if part["type"] == "thinking"]
    text = "".join(part["text"] for part in content if part["type"] == "text")
    return text, "".join(thoughts) if thoughts else None


def _calls(said: Mapping[str, Any], schemas: Schemas | None) -> tuple[ParsedToolCall, ...]:
    calls = []
    for call in said.get("tool_calls") or ():
        raw = f"{call.function.name} {call.function.arguments}"
        calls.append(checked_call(call.function.name, call.function.arguments, raw, schemas, call.id))
    for call in said.get("unparsed_tool_calls") or ():
        status = UNCLOSED if "unterminated" in call.error else "invalid_json"
        calls.append(ParsedToolCall(None, None, call.raw_text, status))
    return tuple(calls)


def _open_reasoning(text: str, opened_by_prompt: bool) -> tuple[bool, str, str | None]:
    """Returns whether a completion ends inside its reasoning, the text before it, and the reasoning if it has tags."""
    at = text.rfind(ANALYSIS)
    if at >= 0:
        return END_OF_ANALYSIS not in text[at:], "", None
    if opened_by_prompt and END_OF_THINKING not in text:
        return True, "", text.removeprefix(THINK)
    before, tag, thought = text.rpartition(THINK)
    return bool(tag) and END_OF_THINKING not in thought, before, thought
