"""Which of the package's families a model is of: the one that renders what the model's own template renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rllm_core.errors import ConfigError
from rllm_renderers.encoding import Encoder
from rllm_renderers.package import (
    Family,
    FamilyError,
    MissingTokensError,
    check_family,
    family_names,
    make_family,
    template_variables,
)

_VISION_KEYS = ("vision_config", "vision_tower", "mm_vision_tower", "image_token_id", "image_token_index")
_OTHERWISE = 'renderer.family = "..." forces one, and parser = "chat_template" works with any template'
# What templates and families raise on conversations they do not take, on purpose or not.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a key up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["key"],
        },
    },
}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ASK = {"role": "user", "content": "What is it now?"}
_NEXT = {"role": "user", "content": "Go on, please!"}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "12 of them"}


def _answer(*, reasoning: bool, call: bool = False) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "Let me see."}
    if reasoning:
        message["reasoning_content"] = "There may be more."
    if call:
        arguments = {"key": "a b", "limit": 3, "exact": True, "unless": None, "deep": {"names": ["x", 0.5]}}
        function = {"name": "look_up", "arguments": arguments}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message


def _conversations(*, reasoning: bool) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    answer, calling = _answer(reasoning=reasoning), _answer(reasoning=reasoning, call=True)
    return [
        ([_ASK, answer, _NEXT], None),
        ([_SYSTEM, _ASK, answer, _NEXT, answer, _ASK], None),
        ([_ASK, calling, _RESULT], [_TOOL]),
        ([_SYSTEM, _ASK, calling, _RESULT, answer, _NEXT], [_TOOL]),
    ]


# Openings say nothing about answers; the rest is there once with reasoning and once without.
_OPENINGS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([_ASK], None),
    ([_SYSTEM, _ASK], None),
    ([_SYSTEM, _ASK], [_TOOL]),
]


@dataclass(frozen=True)
class Resolved:
    """The family of a model.

    Attributes:
        name: The package's name of it.
        family: The package's renderer.
        options: What it was built with, beyond the package's defaults.
        mismatch: How it differs from the model's own template; None if it does not, or if there is no template.
    """

    name: str
    family: Family
    options: Mapping[str, Any]
    mismatch: str | None


def read_model_config(path: str) -> dict[str, Any]:
    """``config.json`` of a model folder or hub name; empty if there is none.

    Raises:
        ConfigError: If it cannot be read.
    """
    from transformers.utils.hub import cached_file

    folder = Path(path).expanduser()
    try:
        if folder.is_dir():
            found: str | None = str(folder / "config.json") if (folder / "config.json").exists() else None
        else:
            found = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
        config = json.loads(Path(found).read_text(encoding="utf-8")) if found is not None else {}
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"config.json of model {path!r} cannot be read: {first_line}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config.json of model {path!r} is not a table")
    return config


def refuse_vision(path: str) -> None:
    """Refuse a model that takes images, as its ``config.json`` says.

    Raises:
        ConfigError: If it does; names the parser to use instead.
    """
    config = read_model_config(path)
    if found := [key for key in _VISION_KEYS if config.get(key) is not None]:
        raise ConfigError(
            f"model {path!r} takes images ({found[0]} in its config.json), which parser 'renderer' cannot carry; "
            'set parser = "chat_template"'
        )


def resolve_family(wanted: str, path: str, tokenizer: Any, encoder: Encoder, options: Mapping[str, Any]) -> Resolved:
    """The family called ``wanted``, or for ``auto`` the one that renders what the model's template renders.

    Nothing is concluded from names, neither a folder's nor that of the model's architecture, which fine-tunes with
    other templates share: every family whose tokens the tokenizer has is a candidate, and it must render a handful of
    conversations token for token as the template does.

    Raises:
        ConfigError: If there is none, or the one that was asked for cannot be used with this model.
    """
    if wanted != "auto":
        check_family(wanted)
        try:
            return _closest(wanted, tokenizer, encoder, options)
        except FamilyError as error:
            raise ConfigError(
                f"renderer.family = {wanted!r} cannot be used with model {path!r}: {error}; "
                'parser = "chat_template" works with any template'
            ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model {path!r} has no chat template that could tell its family; "
            f"set renderer.family to one of {', '.join(family_names())}"
        )
    rejected: list[str] = []
    for name in family_names():
        try:
            candidate = _closest(name, tokenizer, encoder, options)
        except MissingTokensError:
            continue
        except FamilyError as error:
            rejected.append(f"{name} ({error})")
            continue
        if candidate.mismatch is None:
            return candidate
        rejected.append(f"{name} ({candidate.mismatch})")
    candidates = ", ".join(rejected) or "none has its special tokens"
    raise ConfigError(
        f"the chat template of model {path!r} is of no known family; candidates: {candidates}; {_OTHERWISE}"
    )


def _closest(name: str, tokenizer: Any, encoder: Encoder, options: Mapping[str, Any]) -> Resolved:
    """A family with its options; what it would guess from a model's name is found from the template."""
    first: Resolved | None = None
    for guess in _guesses(name, options):
        family = make_family(name, tokenizer, encoder, guess)
        mismatch = None
        if tokenizer.chat_template:
            mismatch = _mismatch(family, tokenizer, encoder, template_variables(name, options), guess)
        found = Resolved(name, family, guess, mismatch)
        if mismatch is None:
            return found
        first = first or found
    assert first is not None
    return first


def _guesses(name: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    if name in ("qwen3.5", "qwen3.6", "qwen3.8") and options.get("enable_thinking") is None:
        return [{**options, "enable_thinking": thinking} for thinking in (True, False)]
    return [dict(options)]


def _mismatch(
    family: Family, tokenizer: Any, encoder: Encoder, variables: Mapping[str, Any], options: Mapping[str, Any]
) -> str | None:
    """In which kind of conversation a family and a template differ."""
    conversations = list(_OPENINGS)
    # With thinking off, the package repeats the empty reasoning of the generation prompt in answers without reasoning,
    # where templates leave it out; that is its documented choice and says nothing about the family.
    if options.get("enable_thinking") is not False:
        conversations += _conversations(reasoning=False)
    conversations += _conversations(reasoning=True)
    taken = 0
    for messages, tools in conversations:
        expected = _template_ids(tokenizer, encoder, messages, tools, variables)
        if expected is None:
            continue
        taken += 1
        try:
            rendered = family.render_ids(messages, tools=tools, add_generation_prompt=True)
        except _REFUSALS as error:
            rendered = None
            refusal = f"{type(error).__name__}: {error}"
        if rendered != expected and not _ignores_reasoning(tokenizer, encoder, messages, tools, variables, expected):
            what = f"{'with' if tools else 'without'} tools, {len(messages)} messages"
            return f"refuses a conversation {what}: {refusal}" if rendered is None else f"differs {what}"
    return None if taken else "the template takes no conversation"


def _template_ids(
    tokenizer: Any,
    encoder: Encoder,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> list[int] | None:
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
        )
    except _REFUSALS:
        return None
    return encoder.encode(text)


def _ignores_reasoning(
    tokenizer: Any,
    encoder: Encoder,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    expected: list[int],
) -> bool:
    """Whether a conversation is only there for its reasoning, and the template prints none."""
    plain = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    return plain != list(messages) and _template_ids(tokenizer, encoder, plain, tools, variables) == expected
