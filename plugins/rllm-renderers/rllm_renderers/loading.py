"""Loads the parts of a model that a parser needs: its tokenizer, and the tokens that end a turn."""

from __future__ import annotations

import functools
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.model_files import read_model_file

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_SECONDS = 5.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def read_model_config(path: str) -> dict[str, Any]:
    """Returns ``config.json`` of a model folder or Hugging Face model ID; empty if there is none.

    Raises:
        ConfigError: If the file cannot be read.
    """
    from transformers.utils.hub import cached_file

    folder = Path(path).expanduser()
    try:
        if folder.is_dir():
            found: str | None = str(folder / "config.json") if (folder / "config.json").exists() else None
        else:
            found = cached_file(
                path, "config.json", local_files_only=is_offline(path), _raise_exceptions_for_missing_entries=False
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json of model {path!r} cannot be read: {_first_line(error)}") from error
    return {} if found is None else read_model_file(Path(found))


def load_tokenizer(path: str, *, trust_remote_code: bool, parser: str) -> Any:
    """Loads a tokenizer that is not shared.

    Args:
        path: Model folder or Hugging Face model ID.
        trust_remote_code: Whether to run code shipped with the tokenizer.
        parser: Name of the parser, so that errors name the right section of the run file.

    Raises:
        ConfigError: If there is no tokenizer, or it must not be loaded.
    """
    if not path:
        raise ConfigError(f"model.path is not set; the {parser} parser needs a model folder or Hugging Face model ID")
    folder = Path(path).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or path.startswith((".", "~")) or folder.exists()):
        raise ConfigError(f"model folder {path} does not exist")
    if not folder.is_dir() and not HUB_NAME.fullmatch(path):
        raise ConfigError(
            f"model folder {path} does not exist, and it is not a Hugging Face model ID (OWNER/MODEL) either"
        )
    offline = is_offline(path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder if folder.is_dir() else path, trust_remote_code=trust_remote_code, local_files_only=offline
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"the tokenizer of model {path!r} needs code shipped with the model, which is not run by default; if "
                f"you trust it, set {parser}.trust_remote_code = true"
            ) from error
        if offline and not folder.is_dir():
            raise ConfigError(
                f"model {path!r} is neither a folder nor downloaded, and the Hugging Face Hub cannot be reached: it "
                "did not answer, or HF_HUB_OFFLINE is set. Use a model folder, or try again later"
            ) from error
        what = _first_line(error)
        if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
            what = f"the folder has neither {' nor '.join(TOKENIZER_FILES)}; use the folder that has them"
        raise ConfigError(f"model {path!r} has no tokenizer that can be loaded: {what}") from error


def is_offline(path: str) -> bool:
    """Returns whether to skip the Hugging Face Hub, because its client would retry each file for half a minute."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or (not Path(path).expanduser().is_dir() and not _answers(constants.ENDPOINT))


@functools.cache
def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # The Hub is reachable; access is checked later.
    except OSError as error:
        # The Hub's client may know other certificates.
        return isinstance(getattr(error, "reason", error), ssl.SSLError)
    return True


def stop_token_ids(path: str, tokenizer: Any) -> list[int]:
    """Returns the ids that end a turn: the tokenizer's end of sequence, then those of ``generation_config.json``.

    Raises:
        ConfigError: If no token ends a turn, or the tokenizer does not have one that does.
    """
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            path,
            "generation_config.json",
            local_files_only=is_offline(path),
            _raise_exceptions_for_missing_entries=False,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"generation_config.json of model {path!r} cannot be read: {_first_line(error)}") from error
    configured = None if found is None else read_model_file(Path(found)).get("eos_token_id")
    stops = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    ids = list(dict.fromkeys(int(stop) for stop in stops if stop is not None))
    if not ids:
        raise ConfigError(
            f"model {path!r} has no token that ends a turn: neither its tokenizer nor its generation_config.json "
            "names an end of sequence"
        )
    if unknown := [stop for stop in ids if stop < 0 or tokenizer.convert_ids_to_tokens(stop) is None]:
        raise ConfigError(
            f"generation_config.json of model {path!r} ends a turn with tokens {unknown}, which its tokenizer does not "
            "have: correct eos_token_id in that file"
        )
    return ids


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
