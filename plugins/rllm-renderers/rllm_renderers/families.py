"""Detects a model's family in package ``renderers``: the family that writes the same tokens as the model's template."""

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
class ResolvedFamily:
    """The family of a model.

    Attributes:
        name: Name of the family in the package.
        template: The package's renderer, as a template.
        options: Options that differ from the package's defaults.
        mismatch: First difference from the model's own template; None if there is no difference, or no template.
        own: The model's own template, if there is one.
    """

    name: str
    template: FamilyTemplate
    options: Mapping[str, Any]
    mismatch: Difference | None
    own: ChatTemplate | None = None


def reject_vision(path: str) -> None:
    """Rejects a model whose ``config.json`` declares images.

    Raises:
        ConfigError: If the model takes images; the message names the parser to use instead.
    """
    config = read_model_config(path)
    if found := [key for key in _VISION_KEYS if config.get(key) is not None]:
        raise ConfigError(
            f"model {path!r} takes images ({found[0]} in its config.json), which parser 'renderer' does not support; "
            'set parser = "chat_template"'
        )


def resolve_family(
    wanted: str, path: str, tokenizer: Any, encoder: Encoder, options: Mapping[str, Any]
) -> ResolvedFamily:
    """Returns the family ``wanted``, or for ``auto`` the family that matches the model's template.

    Neither the folder's nor the architecture's name proves anything, because fine-tunes with other templates share
    them. Every family whose tokens the tokenizer has is a candidate, and must write the corpus of
    `rllm_renderers.probes` token for token like the template. If none writes all of it, the first that writes first
    prompts is used, and the template writes conversations with answers.

    Raises:
        ConfigError: If no family matches, or the wanted family cannot be used with this model.
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
    closest: ResolvedFamily | None = None
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
        # The user did not choose this family, so the model's own template writes where the two differ.
        closest.template.with_answers = closest.own
        return closest
    candidates = ", ".join(rejected) or "none has its special tokens"
    raise ConfigError(
        f"the chat template of model {path!r} matches no known family; candidates: {candidates}; {_OTHERWISE}"
    )


def _closest(name: str, tokenizer: Any, encoder: Encoder, options: Mapping[str, Any]) -> ResolvedFamily:
    """Returns a family with the options that match the template best; the package would guess some from a name."""
    closest: ResolvedFamily | None = None
    for guess in _guesses(name, options):
        template = FamilyTemplate(tokenizer, encoder, *make_family(name, tokenizer, encoder, guess))
        mismatch, own = None, None
        if tokenizer.chat_template:
            own = ChatTemplate(tokenizer, encoder, template.stop_token_ids, template_variables(name, options))
            mismatch = difference(own, template)
        found = ResolvedFamily(name, template, guess, mismatch, own)
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
