"""Adapter for package ``renderers``: its version, its families, and the tokenizer passed to it."""

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
"""Supported releases; even patch releases change the interface."""

_CHARACTERS = 2**24  # Ids from here on are characters; no vocabulary is this large.
_INSTALL = f"pip install 'renderers{VERSIONS}' httpx"


class Family(Protocol):
    """The used part of the interface of the package's renderers."""

    effective_thinking_retention: str

    def render_ids(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Returns the ids of a whole conversation."""

    def parse_response(
        self, token_ids: list[int], *, tools: list[dict[str, Any]] | None, prompt_ids: list[int] | None
    ) -> Any:
        """Returns the completion as parsed by the package."""

    def get_stop_token_ids(self) -> list[int]:
        """Returns the ids that end a turn."""


class FamilyError(Exception):
    """Raised if a family cannot be used with a tokenizer or with its options; the message is one line."""


class MissingTokensError(FamilyError):
    """Raised if the tokenizer lacks a token of the family, so the model belongs to another family."""


class TextTokenizer:
    """A tokenizer for the package whose ordinary tokens are characters.

    The package tokenizes a conversation piece by piece. Where two pieces meet, such as a full stop and a line break,
    its tokens would differ from those of the whole text, which models were trained on. So the package gets characters,
    and an `Encoder` tokenizes its output. The package sees neither a shared tokenizer nor a folder name, and protected
    text (see `Encoder.protect`) stays protected.

    Args:
        tokenizer: Tokenizer of the parser; read on creation, and for the ids of single tokens.
        encoder: Private copy of the tokenizer.
        name_or_path: Name from which some families read options; empty unless an option can be set in no other way.
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
        """Returns the ids of control tokens and characters; adds nothing."""
        known = self._encoder.control_tokens
        return [known[piece] if piece in known else _CHARACTERS + ord(piece) for piece in self._pieces.findall(text)]

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of ids, including control tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        runs = itertools.groupby(ids, key=lambda token: token >= _CHARACTERS)
        return "".join(
            "".join(chr(token - _CHARACTERS) for token in run) if written else self._encoder.decode(list(run))
            for written, run in runs
        )

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Returns the id of a token; if it is missing, the unknown token's id, or None."""
        if token not in self._ids:
            self._ids[token] = self._vocabulary.convert_tokens_to_ids(token)
        return self._ids[token]


def load_package() -> ModuleType:
    """Imports ``renderers``.

    Raises:
        ConfigError: If the package is missing or has another version, or its undeclared dependency ``httpx`` is
            missing.
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
    """Returns the names for ``renderer.family``, without the package's own fallback to a chat template."""
    base = importlib.import_module("renderers.base")
    base._populate_registry()
    return tuple(name for name in base.RENDERER_REGISTRY if name != "default")


def check_family(name: str) -> None:
    """Checks that the package has a family.

    Raises:
        ConfigError: If the family is unknown; the message lists the known ones.
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
    """Creates one of the package's renderers, and its tokenizer.

    Raises:
        FamilyError: If the tokenizer lacks the family's tokens, an option is invalid, or the family needs the network.
    """
    if name == "gpt-oss" and "<|channel|>" not in encoder.control_tokens:
        # Check first: the package would download the family's vocabulary.
        raise MissingTokensError("Special token '<|channel|>' not found in tokenizer vocabulary")
    renderers = load_package()
    harmony = importlib.import_module("openai_harmony")
    # Without the name, the package would silently ignore this option of Nemotron.
    name_or_path = "super" if options.get("low_effort") else ""
    try:
        config = type(renderers.config_from_name(name)).model_validate({"name": name, **options})
        pieces = TextTokenizer(tokenizer, encoder, name_or_path)
        return renderers.create_renderer(pieces, config), pieces
    except ValidationError as error:
        raise FamilyError("; ".join(_complaints(error))) from error
    except harmony.HarmonyError as error:
        raise FamilyError(f"its vocabulary is not in the model folder and cannot be downloaded ({error})") from error
    except (AssertionError, ValueError) as error:  # Raised by the package for a missing special token.
        raise MissingTokensError(str(error).strip().partition("\n")[0]) from error


def template_variables(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a family that are variables of its chat template."""
    config = type(load_package().config_from_name(name))
    return {key: value for key, value in options.items() if key in config.template_field_names()}


def _complaints(error: ValidationError) -> list[str]:
    found = []
    for detail in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in detail["loc"])
        found.append(f"{where}: {detail['msg']}" if where else detail["msg"])
    return found
