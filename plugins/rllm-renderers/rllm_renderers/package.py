"""The package ``renderers`` behind a door of our own: its version, its families and the tokenizer it is given."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet
from pydantic import ValidationError

from rllm_core.errors import ConfigError
from rllm_renderers.encoding import Encoder

VERSIONS = ">=0.1.12,<0.1.13"
"""Releases that differ in the third number differ in the interface."""

_CHARACTERS = 2**24  # ids from here on are characters; no vocabulary reaches it
_INSTALL = f"pip install 'renderers{VERSIONS}' httpx"


class Family(Protocol):
    """What is used of the package's renderers."""

    effective_thinking_retention: str

    def render_ids(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> list[int]:
        """The ids of a whole conversation."""

    def parse_response(
        self, token_ids: list[int], *, tools: list[dict[str, Any]] | None, prompt_ids: list[int] | None
    ) -> Any:
        """The package's reading of a completion."""

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""


class FamilyError(Exception):
    """Why a family cannot be used with a tokenizer or with the options it was given; one line."""


class MissingTokensError(FamilyError):
    """The tokenizer lacks a token of the family, so the model is of another."""


class TextTokenizer:
    """A tokenizer as the package wants it, whose ordinary tokens are characters.

    The package tokenises a conversation piece by piece, so where two pieces meet (a full stop and a line break, say)
    its tokens would differ from those of the same text as a whole, which models have seen. So the package is given
    characters, and an `Encoder` makes tokens of what it wrote. It sees neither the tokenizer that others may hold nor
    the name of a folder, and text that was protected (see `Encoder.protect`) keeps its protection.

    Args:
        tokenizer: The parser's tokenizer; read here, and for the ids of single tokens.
        encoder: Its private copy.
        name_or_path: Some families read options out of it; empty unless an option has no other way in.
    """

    def __init__(self, tokenizer: Any, encoder: Encoder, name_or_path: str = "") -> None:
        self.name_or_path = name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.chat_template: str | None = tokenizer.chat_template
        self._vocabulary = tokenizer
        self._encoder = encoder
        self._ids: dict[str, int | None] = {}
        spellings = sorted(map(re.escape, encoder.control_tokens), key=len, reverse=True)
        self._pieces = re.compile("|".join([*spellings, "."]), re.DOTALL)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of control tokens and characters; nothing is added."""
        known = self._encoder.control_tokens
        return [known[piece] if piece in known else _CHARACTERS + ord(piece) for piece in self._pieces.findall(text)]

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids; control tokens are never left out."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        runs = itertools.groupby(ids, key=lambda token: token >= _CHARACTERS)
        return "".join(
            "".join(chr(token - _CHARACTERS) for token in run) if written else self._encoder.decode(list(run))
            for written, run in runs
        )

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of one token, the unknown token's or None if there is none."""
        if token not in self._ids:
            self._ids[token] = self._vocabulary.convert_tokens_to_ids(token)
        return self._ids[token]


def load_package() -> ModuleType:
    """Import ``renderers``.

    Raises:
        ConfigError: If it, or the ``httpx`` it does not declare, is missing, or its version is another one.
    """
    try:
        version = importlib.metadata.version("renderers")
        if version not in SpecifierSet(VERSIONS):
            raise ConfigError(
                f"parser 'renderer' works with renderers{VERSIONS}, but {version} is installed; run: {_INSTALL}"
            )
        return importlib.import_module("renderers")
    except ImportError as error:
        raise ConfigError(f"parser 'renderer' needs {error.name or 'renderers'}; run: {_INSTALL}") from error


def family_names() -> tuple[str, ...]:
    """Names for ``renderer.family``; the package's own fallback to a chat template is not among them."""
    base = importlib.import_module("renderers.base")
    base._populate_registry()
    return tuple(name for name in base.RENDERER_REGISTRY if name != "default")


def check_family(name: str) -> None:
    """Refuse a family that the package does not have.

    Raises:
        ConfigError: With the names that are there.
    """
    names = family_names()
    if name == "default":
        raise ConfigError(
            'renderer.family = "default" cannot bridge; set parser = "chat_template", which takes any template'
        )
    if name not in names:
        near = get_close_matches(name, names, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"renderer.family = {name!r} is unknown{meant}; choose auto, {', '.join(names)}")


def make_family(
    name: str, tokenizer: Any, encoder: Encoder, options: Mapping[str, Any]
) -> tuple[Family, TextTokenizer]:
    """Build one of the package's renderers, with the tokenizer that it gets.

    Raises:
        FamilyError: If the tokenizer lacks its tokens, it does not take the options, or it needs the network.
    """
    if name == "gpt-oss" and "<|channel|>" not in encoder.control_tokens:
        # The package would first download the family's vocabulary.
        raise MissingTokensError("Special token '<|channel|>' not found in tokenizer vocabulary")
    renderers = load_package()
    harmony = importlib.import_module("openai_harmony")
    # Without the name, the package would ignore this option of Nemotron's without a word.
    name_or_path = "super" if options.get("low_effort") else ""
    try:
        config = type(renderers.config_from_name(name)).model_validate({"name": name, **options})
        pieces = TextTokenizer(tokenizer, encoder, name_or_path)
        return renderers.create_renderer(pieces, config), pieces
    except ValidationError as error:
        raise FamilyError("; ".join(_complaints(error))) from error
    except harmony.HarmonyError as error:
        raise FamilyError(f"its vocabulary is not in the model folder and cannot be downloaded ({error})") from error
    except (AssertionError, ValueError) as error:  # how the package says that a special token is missing
        raise MissingTokensError(str(error).strip().partition("\n")[0]) from error


def template_variables(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a family's options that are variables of its chat template."""
    config = type(load_package().config_from_name(name))
    return {key: value for key, value in options.items() if key in config.template_field_names()}


def _complaints(error: ValidationError) -> list[str]:
    found = []
    for detail in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in detail["loc"])
        found.append(f"{where}: {detail['msg']}" if where else detail["msg"])
    return found
