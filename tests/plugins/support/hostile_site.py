"""Folders with hostile and made-up distributions, and a very short training."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

HOSTILE = ("rllm-hostile", "rllm-good")
CONTROL = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E)} - {"\n"}


def distribution(site: Path, name: str, version: str, *entry_points: str, metadata: str | None = None) -> str:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if metadata is None else metadata
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "entry_points.txt").write_text("\n".join(["[rllm_core]", *entry_points, ""]), encoding="utf-8")
    return str(site)


def beside(installed: Callable[..., list[str]], *sites: str) -> str:
    """Returns a ``PYTHONPATH`` with the hostile packages and further folders."""
    return os.pathsep.join([*sites, *installed(*HOSTILE), *filter(None, [os.environ.get("PYTHONPATH")])])


def training(workflow: str, run_dir: Path) -> list[str]:
    small = ("training.steps=1", "training.groups_per_step=2", "training.rollouts_per_group=2",
             "training.validation_rollouts=2")  # fmt: skip
    options = [argument for override in small for argument in ("-o", override)]
    return ["train", workflow, "--backend", "scripted", "--run-dir", str(run_dir), *options]
