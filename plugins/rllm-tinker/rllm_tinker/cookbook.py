"""Adapter for tinker-cookbook's renderers: supported versions, the table of models, and the tokenizer.

The cookbook is imported on first use, because it imports torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet
from rllm_renderers.encoding import Encoder

from rllm_core.errors import ConfigError
from rllm_core.parser import ToolSpec
from rllm_core.types import thaw
from rllm_tinker.parser_config import INSTALL, WITHOUT, missing

VERSIONS = ">=0.5.7,<0.6"
"""Releases whose renderers our tests cover: 0.5.7 with SDK 0.24.1, 0.5.8 with 0.38.0."""

# Spelling of control tokens in the model families that the cookbook supports.
_CONTROL = re.compile(r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|\[gMASK\]")

Messages = list[dict[str, Any]]


class ConversationRejected(ValueError):
    """A renderer rejected a conversation."""


class Renderer(Protocol):
    """Methods of the cookbook's renderers that this package uses."""

    def build_generation_prompt(self, messages: Messages) -> Any:
        """Returns the prompt as a ``ModelInput``."""

    def build_supervised_example(self, messages: Messages, train_on_what: Any) -> tuple[Any, Any]:
        """Returns a whole conversation as a ``ModelInput``, and weights."""

    def create_conversation_prefix_with_tools(self, tools: Messages, system_prompt: str) -> Messages:
        """Returns messages to put before a conversation that may call tools."""

    def get_stop_sequences(self) -> list[str] | list[int]:
        """Returns the sequences that end a turn."""

    def parse_response(self, response: list[int]) -> tuple[Any, Any]:
        """Returns the parsed message, and how it ended."""


class CookbookTokenizer:
    """A tokenizer with the cookbook's interface, on top of an `Encoder`, so that protected text stays protected.

    Args:
        tokenizer: The parser's tokenizer; only read.
        encoder: Encoder with a private copy of the tokenizer.
    """

    def __init__(self, tokenizer: Any, encoder: Encoder) -> None:
        self.name_or_path = ""  # empty, so that the cookbook cannot load the tokenizer again by name
        self.bos_token: str | None = tokenizer.bos_token
        self.eos_token: str | None = tokenizer.eos_token
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._encoder = encoder
        special = [str(token) for token in tokenizer.all_special_tokens if str(token) in encoder.control_tokens]
        protected = encoder.protect([{"role": "user", "content": token} for token in special])
        self._protected = {token: str(message["content"]) for token, message in zip(special, protected, strict=True)}
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(longest_first) or r"(?!)")

    def encode(self, text: str, add_special_tokens: bool = False, split_special_tokens: bool = False) -> list[int]:
        """See `Encoder.encode`; never adds tokens.

        Args:
            text: Text to encode.
            add_special_tokens: Ignored, because renderers add their own.
            split_special_tokens: Whether to encode special tokens in the text as ordinary text.
        """
        if split_special_tokens:
            text = self._special_pattern.sub(lambda found: self._protected[found[0]], text)
        return self._encoder.encode(text)

    def decode(self, token_ids: int | Sequence[int]) -> str:
        """See `Encoder.decode`; keeps every token."""
        return self._encoder.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Returns the id of a control token."""
        return self._encoder.control_tokens.get(token)


def load_cookbook() -> None:
    """Imports the cookbook's renderers.

    Raises:
        ConfigError: If the cookbook is missing, or its version is not supported.
    """
    try:
        version = importlib.metadata.version("tinker-cookbook")
        if version not in SpecifierSet(VERSIONS):
            raise ConfigError(
                f"parser 'tinker' works with tinker-cookbook{VERSIONS}, but {version} is installed; run: {INSTALL}, "
                f"{WITHOUT}"
            )
        importlib.import_module("tinker_cookbook.renderers")
    except ImportError as error:  # PackageNotFoundError is one
        raise missing(error) from error


def recommended_renderer(model: str) -> str:
    """Returns the renderer that the cookbook recommends for a model's name.

    Raises:
        ConfigError: If the cookbook's table does not have the name.
    """
    table = importlib.import_module("tinker_cookbook.model_info")
    exceptions = importlib.import_module("tinker_cookbook.exceptions")
    try:
        return str(table.get_recommended_renderer_name(model))
    except (exceptions.ConfigurationError, KeyError, ValueError):
        raise ConfigError(
            f"tinker-cookbook's table of models has no {model!r}; set tinker.renderer to the renderer that the model "
            f"was trained with (one of {', '.join(recommended_names())}, ...)"
        ) from None


def recommended_names() -> list[str]:
    """Returns the renderers that the cookbook recommends for some model; it does not list others."""
    table = importlib.import_module("tinker_cookbook.model_info")
    models = [
        model for name in dir(table) if re.fullmatch(r"get_\w+_info", name) for model in getattr(table, name)().values()
    ]
    return sorted({name for model in models for name in model.recommended_renderers})


def make_renderer(name: str, tokenizer: CookbookTokenizer) -> Renderer:
    """Creates one of the cookbook's renderers.

    Raises:
        ConfigError: If the name is unknown, or the tokenizer lacks the renderer's tokens.
    """
    renderers = importlib.import_module("tinker_cookbook.renderers")
    exceptions = importlib.import_module("tinker_cookbook.exceptions")
    try:
        renderer: Renderer = renderers.get_renderer(name, tokenizer)
        ids = [*_stops(renderer), *renderer.build_generation_prompt([{"role": "user", "content": "?"}]).to_ints()]
    except exceptions.RendererError as error:
        names = recommended_names()
        near = get_close_matches(name, names, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"tinker.renderer = {name!r}{meant}: {_line(error)}; choose auto, {', '.join(names)}"
        ) from error
    except (AssertionError, ImportError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        # Renderers raise these if the tokenizer belongs to another model family.
        raise ConfigError(
            f"tinker.renderer = {name!r} cannot be used with this model's tokenizer: {_line(error)}"
        ) from error
    missing = sorted(set(_CONTROL.findall(tokenizer.decode(ids))).difference(tokenizer._encoder.control_tokens))
    if missing:
        raise ConfigError(
            f"tinker.renderer = {name!r} cannot be used with this model's tokenizer, which has no token {missing[0]}"
        )
    return renderer


def _stops(renderer: Renderer) -> list[int]:
    return [stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)]


def stop_token_ids(name: str, renderer: Renderer, tokenizer: CookbookTokenizer) -> tuple[int, ...]:
    """Returns the ids that end a turn; without any, the end-of-sequence token if the renderer accepts it.

    Raises:
        ConfigError: If no token ends a turn.
    """
    stops = _stops(renderer)
    eos = tokenizer.eos_token_id
    if not stops and eos is not None:
        _, ending = renderer.parse_response([*tokenizer.encode("Yes."), eos])
        stops = [eos] if ending.is_clean else []
    if not stops:
        raise ConfigError(f"tinker.renderer = {name!r} has no token that ends a turn; choose another")
    return tuple(dict.fromkeys(stops))


def rendered(
    renderer: Renderer, messages: Messages, tools: Messages, *, add_generation_prompt: bool = True
) -> list[int]:
    """Renders a conversation, given in the cookbook's types, to token ids.

    Raises:
        Rejected: If the renderer rejects the conversation.
    """
    exceptions = importlib.import_module("tinker_cookbook.exceptions")
    base = importlib.import_module("tinker_cookbook.renderers")
    try:
        if tools:
            system = ""
            if messages and messages[0]["role"] == "system":
                system, messages = base.ensure_text(messages[0]["content"]), messages[1:]
            messages = [*renderer.create_conversation_prefix_with_tools(tools, system), *messages]
        if add_generation_prompt:
            ids: list[int] = renderer.build_generation_prompt(messages).to_ints()
        else:
            whole, _ = renderer.build_supervised_example(messages, base.TrainOnWhat.ALL_TOKENS)
            ids = whole.to_ints()
    except (
        exceptions.RendererError,
        AssertionError,
        AttributeError,
        LookupError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:
        raise ConversationRejected(f"the renderer rejects the conversation: {_line(error)}") from error
    return ids


def cookbook_message(plain: Mapping[str, Any], *, with_reasoning: bool) -> dict[str, Any]:
    """Converts a message from OpenAI's format to the cookbook's.

    Args:
        plain: Message to convert.
        with_reasoning: Whether to keep the message's reasoning.

    Raises:
        ConfigError: If the message contains anything but text.
    """
    renderers = importlib.import_module("tinker_cookbook.renderers")
    text = _text(plain.get("content"))
    found: dict[str, Any] = {"role": plain["role"], "content": text}
    reasoning = next((plain[key] for key in ("reasoning_content", "reasoning", "thinking") if plain.get(key)), None)
    if reasoning is not None and with_reasoning:
        parts = [{"type": "thinking", "thinking": str(reasoning)}]
        found["content"] = [*parts, {"type": "text", "text": text}] if text else parts
    calls = []
    for call in plain.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(thaw(arguments or {}), ensure_ascii=False)
        body = renderers.ToolCall.FunctionBody(name=function.get("name"), arguments=written)
        calls.append(renderers.ToolCall(id=call.get("id"), function=body))
    if calls:
        found["tool_calls"] = calls
    return found | {key: plain[key] for key in ("tool_call_id", "name") if plain["role"] == "tool" and plain.get(key)}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ConfigError(f"parser 'tinker' takes text only, a message holds {kind!r}; set parser = \"chat_template\"")


def cookbook_tool(tool: ToolSpec) -> dict[str, Any]:
    """Converts a tool, flat or in OpenAI's envelope, to the cookbook's format; keeps key order, which is printed."""
    function: dict[str, Any] = thaw(dict(tool.get("function", tool)))
    function.setdefault("description", "")
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return function


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]
