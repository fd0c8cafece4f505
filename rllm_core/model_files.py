"""Files of a model folder: what they describe, and whether they are complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError

CONFIG_FILE = "config.json"


def read_model_file(file: Path) -> dict[str, Any]:
    """Reads a file that describes a model, such as its ``config.json``.

    Raises:
        ConfigError: If the file cannot be read, or is not a JSON object.
    """
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(described, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{file.name} of model {str(file.parent)!r} cannot be read: {first_line}; copy or download the file again"
        ) from error
    return described


def random_weights(parameters: Iterable[str], loaded: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parameters that transformers has drawn at random, because the model's files lack them.

    Args:
        parameters: Names of the model's parameters.
        loaded: What ``from_pretrained`` returns with ``output_loading_info=True``.
    """
    drawn = loaded["missing_keys"].union(name for name, *_ in loaded["mismatched_keys"])
    return [name for name in parameters if name in drawn]


def check_weights(path: str, random: Sequence[str]) -> None:
    """Checks that a library has found all weights of a model, rather than drawing some at random with a warning.

    Args:
        path: ``model.path``.
        random: Names of the parameters that the library has drawn.

    Raises:
        ConfigError: If there are any.
    """
    if random:
        names = random[0] if len(random) == 1 else f"{random[0]} and {len(random) - 1} more"
        raise ConfigError(
            f"model.path = {path!r}: its files lack weights of the sizes in config.json ({names}), which would start "
            "at random; use a complete model of this architecture"
        )
