"""What a parser needs of a model folder or hub name: its tokenizer, and the tokens that end a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError


def load_tokenizer(path: str, *, trust_remote_code: bool, parser: str) -> Any:
    """A tokenizer that nobody else holds.

    Args:
        path: Model folder or hub name.
        trust_remote_code: Whether to run code that comes with it.
        parser: For whom, so that errors name the right section of the run file.

    Raises:
        ConfigError: If there is none, or none that may be loaded.
    """
    if not path:
        raise ConfigError(f"model.path is not set; the {parser} parser needs a model folder or hub name")
    folder = Path(path).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or path.startswith((".", "~")) or folder.exists()):
        raise ConfigError(f"model folder {path} does not exist")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder if folder.is_dir() else path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"the tokenizer of model {path!r} is code that comes with the model, and is not run; if you trust it, "
                f"set {parser}.trust_remote_code = true"
            ) from error
        raise ConfigError(f"model {path!r} has no tokenizer that can be loaded: {_first_line(error)}") from error


def stop_token_ids(path: str, tokenizer: Any) -> list[int]:
    """Ids that end a turn: the tokenizer's end of sequence, then those of ``generation_config.json``.

    Raises:
        ConfigError: If there are none.
    """
    from transformers.utils.hub import cached_file

    configured: Any = None
    try:
        found = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
        if found is not None:
            configured = json.loads(Path(found).read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"generation_config.json of model {path!r} cannot be read: {_first_line(error)}") from error
    stops = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    ids = list(dict.fromkeys(int(stop) for stop in stops if stop is not None))
    if not ids:
        raise ConfigError(
            f"model {path!r} has no token that ends a turn: neither its tokenizer nor its generation_config.json "
            "names an end of sequence"
        )
    return ids


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
