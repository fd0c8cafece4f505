"""Exports a checkpoint: downloads its adapters from the server, in a form that PEFT can load."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import tarfile
import urllib.parse
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, RunError
from rllm_tinker import sdk
from rllm_tinker.backend import CHECKPOINT, server_of
from rllm_tinker.connection import Connection, ServerSettings
from rllm_tinker.sdk import Lost

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPORT_TTL_SECONDS = 24 * 3600
DOWNLOAD_SECONDS = 3600.0
_MODULE = re.compile(r"(?:.+\.)?(\w+)\.lora_[AB]\.weight")


def export(checkpoint: Path, config: RunConfig, target: Path) -> None:
    """Writes PEFT adapters, downloaded from the server, and the tokenizer. See `rllm_core.backend`.

    Raises:
        ConfigError: If the SDK has no function for downloads, or transformers is not installed.
        RunError: If the server does not respond, no longer has the state, or has no downloads.
    """
    state = json.loads((checkpoint / CHECKPOINT).read_text(encoding="utf-8"))
    _save_tokenizer(config.model.path, target)
    server, archive = server_of(config), target / "archive.tar"
    try:
        asyncio.run(_download(server, state["path"], archive))
        _unpack(archive, target)
    except Lost as lost:
        raise RunError(f"{server.label} did not export {state['path']}: {lost}") from None
    finally:
        archive.unlink(missing_ok=True)
    _complete_config(target, state["base_model"])


def _save_tokenizer(model: str, target: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ConfigError("exporting a tokenizer needs transformers: pip install transformers") from error
    AutoTokenizer.from_pretrained(model).save_pretrained(target)


async def _download(server: ServerSettings, path: str, archive: Path) -> None:
    """Downloads the adapters of a saved state, which the server converts for sampling and packs."""
    connection = Connection(server)
    await connection.reach()
    await connection.connect()
    try:
        trainer = await connection.from_state(path)
        name = f"rllm-export-{secrets.token_hex(4)}"
        lasting = {"ttl_seconds": EXPORT_TTL_SECONDS} if server.samplers == "snapshots" else {}
        saving = trainer.save_weights_for_sampler(name, **lasting)
        saved = await connection.answer(f"converting {path}", saving)
        what = f"downloading {saved.path}"
        await sdk.made(DOWNLOAD_SECONDS, what, _fetch, connection, str(saved.path), archive)
    finally:
        await connection.disconnect()


def _fetch(connection: Connection, path: str, archive: Path) -> None:
    server = connection.settings
    model, _, name = path.removeprefix("tinker://").partition("/")
    if server.base_url:
        # SDK 0.38 has no function for this, but servers that speak the protocol of 0.24 have the route.
        run = f"{server.base_url.rstrip('/')}/api/v1/training_runs/{urllib.parse.quote(model)}"
        request = urllib.request.Request(f"{run}/checkpoints/{urllib.parse.quote(name)}/archive")
        request.add_unredirected_header("X-API-Key", server.key)
    else:
        request = urllib.request.Request(connection.archive_url(model, name))
    with urllib.request.urlopen(request) as answer, archive.open("wb") as file:
        shutil.copyfileobj(answer, file)


def _unpack(archive: Path, target: Path) -> None:
    """Writes the two files of the adapters, whatever else the archive contains."""
    try:
        with tarfile.open(archive) as files:
            found = {Path(member.name).name: member for member in files if member.isfile()}
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                with (
                    closing(cast("IO[bytes]", files.extractfile(found[name]))) as content,
                    (target / name).open("wb") as file,
                ):
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, KeyError) as error:
        raise RunError(f"the server's archive holds no PEFT adapters: {type(error).__name__}: {error}") from error


def _complete_config(target: Path, base_model: str) -> None:
    """Adds to the adapters' configuration the base model's name, and the trained layers, which SkyRL omits."""
    path = target / ADAPTER_CONFIG
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = str(Path(base_model).resolve()) if Path(base_model).is_dir() else base_model
    settings["task_type"] = settings.get("task_type") or "CAUSAL_LM"
    if not settings.get("target_modules"):
        settings["target_modules"] = _modules(target / ADAPTER_WEIGHTS)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _modules(weights: Path) -> list[str]:
    """Returns the names of the layers that have adapters, from the header of a safetensors file."""
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = [name for name in header if name != "__metadata__"]
    found = {name: _MODULE.fullmatch(name) for name in names}
    unknown = [name for name, match in found.items() if match is None]
    if unknown:
        raise RunError(f"the server's adapters have a weight {unknown[0]!r} that PEFT does not know")
    return sorted({match[1] for match in found.values() if match is not None})
