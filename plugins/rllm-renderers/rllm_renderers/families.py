"""Which of the package's families a model is of: the one that writes what the model's own template writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllm_core.errors import ConfigError
from rllm_renderers.encoding import Encoder
from rllm_renderers.loading import read_model_config
from rllm_renderers.package import (
    FamilyError,
    MissingTokensError,
    check_family,
    family_names,
    make_family,
    template_variables,
)
from rllm_renderers.probes import Difference, difference
from rllm_renderers.template import ChatTemplate, FamilyTemplate

_VISION_KEYS = ("vision_config", "vision_tower", "mm_vision_tower", "image_token_id", "image_token_index")
_OTHERWISE = 'force a family with renderer.family = "...", or set parser = "chat_template", which takes any template'


@dataclass(frozen=True)
class Resolved:
    """The family of a model.

    Attributes:
        name: The package's name of it.
        template: The package's renderer, as what writes conversations.
        options: What it was built with, beyond the package's defaults.
        mismatch: How it differs from the model's own template; None if it does not, or if there is no template.
        own: That template, if there is one.
    """

    name: str
    template: FamilyTemplate
    options: Mapping[str, Any]
    mismatch: Difference | None
    own: ChatTemplate | None = None


def refuse_vision(path: str) -> None:
    """Refuse a model that takes images, as its ``config.json`` says.

    Raises:
        ConfigError: If it does; names the parser to use instead.
    """
    config = read_model_config(path)
    if found := [key for key in _VISION_KEYS if config.get(key) is not None]:
        raise ConfigError(
            f"model {path!r} takes images ({found[0]} in its config.json), which parser 'renderer' does not support; "
            'set parser = "chat_template"'
        )


def resolve_family(wanted: str, path: str, tokenizer: Any, encoder: Encoder, options: Mapping[str, Any]) -> Resolved:
    """The family called ``wanted``, or for ``auto`` the one that writes what the model's template writes.

    Nothing is concluded from names, neither a folder's nor that of the model's architecture, which fine-tunes with
    other templates share: every family whose tokens the tokenizer has is a candidate, and it must write the corpus of
    `rllm_renderers.probes` token for token as the template does. If none writes all of it, one that writes first
    prompts is taken, and what has been answered is written by the template.

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
                'set parser = "chat_template", which takes any template'
            ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model {path!r} has no chat template to detect its family from; "
            f"set renderer.family to one of {', '.join(family_names())}"
        )
    rejected: list[str] = []
    closest: Resolved | None = None
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
        if not candidate.mismatch.of_prompt:
            closest = closest or candidate
        rejected.append(f"{name} ({candidate.mismatch})")
    if closest is not None:
        # Nobody asked for this family, so what it writes otherwise is written as the model's own template does.
        closest.template.with_answers = closest.own
        return closest
    candidates = ", ".join(rejected) or "none has its special tokens"
    raise ConfigError(
        f"the chat template of model {path!r} matches no known family; candidates: {candidates}; {_OTHERWISE}"
    )


def _closest(name: str, tokenizer: Any, encoder: Encoder, options: Mapping[str, Any]) -> Resolved:
    """A family with its options; what it would guess from a model's name is found from the template."""
    closest: Resolved | None = None
    for guess in _guesses(name, options):
        template = FamilyTemplate(tokenizer, encoder, *make_family(name, tokenizer, encoder, guess))
        mismatch, own = None, None
        if tokenizer.chat_template:
            own = ChatTemplate(tokenizer, encoder, template.stop_token_ids, template_variables(name, options))
            mismatch = difference(own, template)
        found = Resolved(name, template, guess, mismatch, own)
        if mismatch is None:
            return found
        if closest is None or (closest.mismatch is not None and closest.mismatch.of_prompt):
            closest = found
    assert closest is not None
    return closest


def _guesses(name: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    if name in ("qwen3.5", "qwen3.6", "qwen3.8") and options.get("enable_thinking") is None:
        return [{**options, "enable_thinking": thinking} for thinking in (True, False)]
    return [dict(options)]
