"""Exports a checkpoint: ``export-model``, ``verl-export``.

verl's model merger writes weights as a Hugging Face model folder; adapters become a folder for PEFT.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click

from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder import checkpoint
from rllm_verl import verl_api
from rllm_verl.backend import ADAPTER, STATE, WEIGHTS
from rllm_verl.config import VerlConfig

MERGERS = {"bfloat16": "verl.model_merger", "float32": "rllm_verl.merger"}
MERGE_DEADLINE_SECONDS = 6 * 3600
# Folder where verl's Megatron bridge writes weights in Hugging Face format; without the bridge, there are only shards.
BRIDGED = Path("model") / "huggingface"


@click.command("verl-export", short_help="Earlier name of export-model, for backend verl.")
@click.argument("source", type=click.Path(path_type=Path), metavar="RUN|CHECKPOINT")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model. Only for models you trust."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(source: Path, folder: Path, trust_remote_code: bool, as_json: bool) -> None:
    """Earlier name of export-model, for backend verl.

    RUN|CHECKPOINT is a checkpoint folder (runs/RUN/checkpoints/step-NNNNNN), or a run folder to export its latest
    complete checkpoint. FOLDER must be new or empty, and appears once the export is complete. It contains weights,
    configuration and tokenizer; after training with [verl.lora], adapters in the format of PEFT.
    """
    click.echo("verl-export is now rllm-core export-model RUN FOLDER, for every backend", err=True)
    found = export(source, folder, trust_remote_code=trust_remote_code)
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(f"step {found['step']} (weight version {found['weight_version']}) of {found['checkpoint']}")
        click.echo(f"model: {found['folder']}")


def write_model(checkpoint: Path, config: RunConfig, target: Path) -> None:
    """Writes the model for transformers, in the precision of the run (``verl.dtype``), or its adapters for PEFT.

    See `rllm_core.backend`.

    Raises:
        ConfigError: If verl is not installed.
        RunError: If verl's merger fails.
    """
    verl_api.installed_version()
    verl: VerlConfig = config.plugins.get("verl") or VerlConfig()
    if (checkpoint / ADAPTER).is_dir():
        _copy_adapters(checkpoint, target)
        return
    strategy = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["strategy"]
    _merge(checkpoint / WEIGHTS, target, strategy, dtype=verl.dtype, trust_remote_code=verl.trust_remote_code)


def export(source: Path, folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Exports a checkpoint to a folder that transformers can load, or PEFT if the run trained adapters.

    Args:
        source: Checkpoint folder, or a run folder to export its latest complete checkpoint.
        folder: Output folder, new or empty.
        trust_remote_code: Whether to run Python code that comes with the model.

    Returns:
        JSON object: ``checkpoint, step, weight_version, strategy, folder``.

    Raises:
        ConfigError: If there is no checkpoint of this backend, the output folder exists, or verl is not installed.
        RunError: If the checkpoint is incomplete or damaged, or verl's merger fails.
    """
    verl_api.installed_version()
    partial = folder.with_name(f"{folder.name}.partial")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another one")
    if partial.exists():
        raise ConfigError(
            f"{partial} exists: another export is running or was interrupted. If none is running, remove it"
        )
    saved = _checkpoint(source)
    manifest = _verified(saved)
    state = json.loads((saved / "backend" / STATE).read_text(encoding="utf-8"))
    partial.mkdir(parents=True)
    try:
        if (saved / "backend" / ADAPTER).is_dir():
            _copy_adapters(saved / "backend", partial)
        else:
            _merge(
                saved / "backend" / WEIGHTS,
                partial,
                state["strategy"],
                dtype=_precision(saved),
                trust_remote_code=trust_remote_code,
            )
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return {
        "checkpoint": str(saved),
        "step": manifest["step"],
        "weight_version": manifest["coordinator"]["weight_version"],
        "strategy": state["strategy"],
        "folder": str(folder),
    }


def _checkpoint(source: Path) -> Path:
    if not source.is_dir():
        raise ConfigError(f"{source} is not a folder; name a run folder or a checkpoint in one")
    if not (source / "checkpoints").is_dir():
        return source
    found = checkpoint.complete(source / "checkpoints")
    if not found:
        raise ConfigError(f"run folder {source} has no complete checkpoint")
    return found[-1]


def _verified(saved: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint of this backend, after all checks of its files."""
    manifest = checkpoint.read(saved)
    if f"backend/{STATE}" not in manifest["files"]:
        raise ConfigError(f"checkpoint {saved} was not written by backend 'verl': it has no backend/{STATE}")
    checkpoint.check_backend_files(saved, manifest)
    return manifest


def _precision(saved: Path) -> str:
    """Returns the precision of the run that a checkpoint belongs to, or the default of ``verl.dtype`` outside a run."""
    run_file = saved.absolute().parents[1] / "run.toml"
    verl = tomllib.loads(run_file.read_text(encoding="utf-8")).get("verl", {}) if run_file.is_file() else {}
    return str(verl.get("dtype", VerlConfig().dtype))


def _copy_adapters(checkpoint: Path, target: Path) -> None:
    """Copies adapters and tokenizer. Leaves the model's configuration out, because the folder contains no model."""
    shutil.copytree(checkpoint / ADAPTER, target, dirs_exist_ok=True)
    of_model = ("config.json", "generation_config.json")
    for file in (checkpoint / WEIGHTS / "huggingface").iterdir():
        if file.is_file() and file.name not in of_model:
            shutil.copyfile(file, target / file.name)


def _merge(weights: Path, target: Path, strategy: str, *, dtype: str, trust_remote_code: bool) -> None:
    is_megatron = strategy == "megatron"
    if is_megatron and any((weights / BRIDGED).glob("*.safetensors")):
        shutil.copytree(weights / BRIDGED, target, dirs_exist_ok=True)
        return
    options = ["--backend", "megatron" if is_megatron else "fsdp", "--local_dir", weights, "--target_dir", target]
    if trust_remote_code:
        options.append("--trust-remote-code")
    if is_megatron:
        options.append("--use_cpu_initialization")
        if json.loads((weights / BRIDGED / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"):
            options.append("--tie-word-embedding")
    merger = MERGERS["bfloat16" if is_megatron else dtype]
    # -P: do not import verl from a folder of that name in the working directory.
    merge = [sys.executable, "-P", "-m", merger, "merge", *options]
    try:
        done = subprocess.run(
            merge,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MERGE_DEADLINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"verl's model merger did not finish within {MERGE_DEADLINE_SECONDS} s") from None
    if done.returncode != 0:
        # The merger prints its error on its last line.
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RunError(f"verl's model merger failed: {said[-1] if said else f'exit code {done.returncode}'}")
