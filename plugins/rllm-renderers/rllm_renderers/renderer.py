"""``renderer``: the hand-written renderers of the package ``renderers``, one per model family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field, field_validator

from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, ParsedCompletion, ParsedToolCall, Termination, ToolSpec
from rllm_core.types import MessageLike, TokenIds, freeze, message, starts_with, thaw, token_ids
from rllm_renderers.encoding import ControlTokens, Encoder
from rllm_renderers.families import refuse_vision, resolve_family
from rllm_renderers.loading import load_tokenizer
from rllm_renderers.package import load_package
from rllm_renderers.renderer_check import bridged_tails, shows_tools
from rllm_renderers.self_check import Tail

FAMILY_KEY = "renderer_family"
"""Key of a model's ``tokenizer_config.json`` that names its family."""

_FIRST_LOOK_TOKENS = 512


class RendererConfig(Section):
    """``[renderer]``: which of the package's renderers is used, and how."""

    family: Annotated[
        str,
        Field(
            description="Name of a model family in the package; auto is the one that the model's tokenizer_config.json "
            "names as renderer_family, else the one that renders what the model's own chat template renders."
        ),
    ] = "auto"
    family_options: Annotated[
        dict[str, Any],
        Field(description="Options of that family in the package, e.g. {enable_thinking = false}; others are errors."),
    ] = Field(default_factory=dict)
    thinking_retention: Annotated[
        Literal["all", "tool_cycle", "template"],
        Field(
            description="Where reasoning stays in the next prompt: everywhere, until the user speaks again, or as the "
            "family's template has it. What it leaves out cannot be continued token for token."
        ),
    ] = "all"
    bridge: Annotated[
        bool,
        Field(
            description="Carry a conversation's sampled tokens into its next prompt; true is an error for a model "
            "where that is not proven exact, false renders every turn anew."
        ),
    ] = True
    control_tokens: Annotated[
        ControlTokens,
        Field(
            description="What becomes of text of users and tools that spells a control token: neutralise writes it "
            "with ordinary tokens, raw lets it become that token."
        ),
    ] = "neutralise"
    trust_remote_code: Annotated[
        bool, Field(description="Run tokenizer code that comes with the model; only for models you trust.")
    ] = False

    @field_validator("family_options")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for taken, instead in (("name", "renderer.family"), ("thinking_retention", "renderer.thinking_retention")):
            if taken in value:
                raise ValueError(f"{taken!r} is set with {instead}")
        return value


class RendererParser(BaseParser):
    """Renders, reads and bridges with the renderer that the package has for the model's family.

    Bridging is on only for the kinds of tail in ``bridged_tails``, for which a check at construction found it equal,
    token for token, to rendering a whole conversation. Whatever the package returns, prompt and completion are
    carried over by this class, so the prefix holds or there is no bridge.

    Args:
        tokenizer: A tokenizer, which from now on is the parser's alone.
        config: Its section of the run file.
        path: Model folder or hub name, for messages.

    Attributes:
        family: The package's name of the family.
        family_options: What it was built with, beyond the package's defaults.
        mismatch: How the family differs from the model's own chat template; None if it does not.
        bridged_tails: The kinds of tail that are bridged.
    """

    name: ClassVar[str] = "renderer"

    def __init__(self, tokenizer: Any, config: RendererConfig | None = None, *, path: str = "") -> None:
        load_package()
        self.config = config or RendererConfig()
        self.encoder = Encoder(tokenizer, self.config.control_tokens)
        self._tokenizer = tokenizer
        options = dict(self.config.family_options)
        if self.config.thinking_retention != "template":
            options["thinking_retention"] = self.config.thinking_retention
        wanted = self.config.family
        if wanted == "auto":  # who changed the template, but not the family, can say so in tokenizer_config.json
            wanted = str(getattr(tokenizer, "init_kwargs", {}).get(FAMILY_KEY) or wanted)
        resolved = resolve_family(wanted, path, tokenizer, self.encoder, options)
        self.family = resolved.name
        self.family_options = dict(resolved.options)
        self.mismatch = resolved.mismatch
        self._renderer = resolved.family
        self._stop_token_ids = tuple(dict.fromkeys(self._renderer.get_stop_token_ids()))
        self.supports_tools = shows_tools(self._renderer)
        self.bridged_tails: frozenset[Tail] = frozenset()
        if self.config.bridge:
            self.bridged_tails = bridged_tails(self._renderer, self.encoder, self._stop_token_ids, self.supports_tools)
            if not self.bridged_tails:
                raise ConfigError(
                    f"family {self.family!r} of parser 'renderer' does not continue conversations token for token with "
                    f'renderer.thinking_retention = "{self.config.thinking_retention}"; choose another, or set '
                    "renderer.bridge = false to render every turn anew"
                )
        self.supports_bridge = bool(self.bridged_tails)

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> RendererParser:
        """Find the family of a model folder (or hub name), and load its tokenizer for this parser alone.

        Raises:
            ConfigError: If the package is missing or another version, the model takes images, its family is unknown or
                cannot do what the section asks for.
        """
        section = RendererConfig.model_validate({} if config is None else config)
        load_package()
        is_folder = bool(str(path)) and Path(path).expanduser().is_dir()
        if is_folder:
            refuse_vision(str(path))
        tokenizer = load_tokenizer(str(path), trust_remote_code=section.trust_remote_code, parser=cls.name)
        if not is_folder:  # the tokenizer's complaints about a wrong name are better
            refuse_vision(str(path))
        return cls(tokenizer, section, path=str(path))

    @property
    def tokenizer(self) -> Any:
        """The parser's private tokenizer."""
        return self._tokenizer

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """See `BaseParser.get_stop_token_ids`: those of the family."""
        return self._stop_token_ids

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """See `BaseParser.count_control_tokens`."""
        return self.encoder.count(messages)

    def describe(self) -> Mapping[str, Any]:
        """See `BaseParser.describe`: the family, and how it compares with the model's own chat template."""
        compared = "renders the same" if self.mismatch is None else self.mismatch
        return {
            "family": self.family,
            "family_options": self.family_options,
            "chat_template": compared if self._tokenizer.chat_template else "none in the model folder",
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
            ConfigError: If a message holds something else than text.
            ValueError: If the family does not take the conversation.
        """
        return self._renderer.render_ids(
            self._plain(messages), tools=_envelopes(tools), add_generation_prompt=add_generation_prompt
        )

    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """See `BaseParser.parse_completion`; statuses are the package's.

        Formats without quotes around text need ``tools`` to tell it from numbers; without them the package marks such
        calls ``invalid_json``.
        """
        sampled: list[int] = token_ids(completion_ids).tolist()
        prompt = None if prompt_ids is None else self._since_last_stop(token_ids(prompt_ids)).tolist()
        stop = next((position for position, token in enumerate(sampled) if token in self._stop_token_ids), None)
        try:
            response = self._renderer.parse_response(sampled, tools=_envelopes(tools), prompt_ids=prompt)
        except (ValueError, RecursionError):
            # JSON that Python refuses to read: numbers of thousands of digits, nesting of thousands of levels.
            call = ParsedToolCall(None, None, self.encoder.decode(sampled[:stop]), "invalid_json")
            return ParsedCompletion("", tool_calls=(call,), termination=_termination(stop, False))
        calls = tuple(_call(call) for call in response.tool_calls)
        is_open = response.reasoning_complete is False
        reasoning = response.reasoning_content
        if reasoning is None and is_open:
            reasoning = ""
        unfinished = is_open or any(call.status == "unclosed_block" for call in calls)
        return ParsedCompletion(
            response.content,
            reasoning=reasoning,
            tool_calls=calls,
            termination=_termination(stop, unfinished),
            reasoning_complete=None if reasoning is None else response.reasoning_complete,
        )

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> TokenIds | None:
        """See `BaseParser.bridge_to_next_turn`, and the class for when there is none."""
        if not len(prompt_ids) or Tail.of(new_messages, tools) not in self.bridged_tails:
            return None
        try:
            messages = self._plain(new_messages)
        except (ConfigError, ValueError):  # rendering the whole conversation says what is wrong with them
            return None
        prompt, completion = token_ids(prompt_ids), token_ids(completion_ids)
        # Of the prompt, the package's bridges read only what follows the last stop token, to see whether it opened
        # reasoning; the rest they copy. Without it a turn costs the same whether it is the fifth or the hundredth.
        recent = self._since_last_stop(prompt)
        extended = self._renderer.bridge_to_next_turn(
            recent.tolist(), completion.tolist(), messages, tools=_envelopes(tools)
        )
        if extended is None:
            return None
        tail = np.array(extended.token_ids, np.int32)
        if not starts_with(tail, np.concatenate([recent, completion])):
            return None  # it cuts off what was sampled after a stop token
        bridged = np.concatenate([prompt[: len(prompt) - len(recent)], tail])
        bridged.setflags(write=False)
        return bridged

    def _since_last_stop(self, prompt: TokenIds) -> TokenIds:
        """The end of a prompt, from its last stop token on; all of it if there is none."""
        width = _FIRST_LOOK_TOKENS
        while True:
            window = prompt[-width:].tolist()
            back = next((n for n, token in enumerate(reversed(window), 1) if token in self._stop_token_ids), None)
            if back is not None:
                return prompt[-back:]
            if width >= len(prompt):
                return prompt
            width *= 4

    def _plain(self, messages: Sequence[MessageLike]) -> list[dict[str, Any]]:
        return [_normalised(thaw(given)) for given in self.encoder.protect([message(given) for given in messages])]


def _normalised(plain: dict[str, Any]) -> dict[str, Any]:
    """A message as every family of the package takes it."""
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(_text(part) for part in content)
    elif content is None:
        plain["content"] = ""
    for alias in ("reasoning", "thinking"):
        spelt = plain.pop(alias, None)
        if spelt is not None:
            plain.setdefault("reasoning_content", spelt)
    if plain.get("reasoning_content") is None:
        plain.pop("reasoning_content", None)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_data(call) for call in plain["tool_calls"]]
    return plain


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ConfigError(f"parser 'renderer' takes text only, a message holds {kind!r}; set parser = \"chat_template\"")


def _with_data(call: Any) -> Any:
    """A tool call with its arguments as data, not as the JSON text that APIs exchange."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        function = {**function, "arguments": json.loads(function["arguments"])}
    except (ValueError, RecursionError):  # the family gets the text as it is
        return call
    return {**call, "function": function} if "function" in call else function


def _envelopes(tools: Sequence[ToolSpec] | None) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's envelope, which is what models saw in training."""
    if not tools:
        return None
    return [
        thaw(dict(tool)) if "function" in tool else {"type": "function", "function": thaw(dict(tool))} for tool in tools
    ]


def _termination(stop: int | None, unfinished: bool) -> Termination:
    if stop is None:
        return Termination.TRUNCATED
    return Termination.MALFORMED if unfinished else Termination.STOP


def _call(call: Any) -> ParsedToolCall:
    """A call of the package's as one of ours: executable only if its name is text and its arguments a JSON object."""
    status, name = str(call.status), call.name
    if not isinstance(name, str) or not name:
        name, status = None, "missing_name" if status == "ok" else status
    arguments = call.arguments
    if isinstance(arguments, str) and status == "ok":
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            status = "invalid_json"
    if not isinstance(arguments, Mapping):
        arguments, status = None, "malformed_structure" if status == "ok" else status
    try:
        arguments = freeze(arguments)
    except ValueError:  # NaN, half a surrogate pair: the standard has no such JSON
        arguments, status = None, "invalid_json" if status == "ok" else status
    return ParsedToolCall(name, arguments, call.raw, status, call.id)
