"""``rllm-core placeholder``: draws the rewards of a run as bars."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rllm_core.errors import UserError

WIDTH = 50


@click.command("placeholder")
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(run_dir: Path) -> None:
    """Draw the mean reward of every optimizer step of RUN_DIR, one line per step."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{run_dir} has no metrics.jsonl; pass the folder of a training run")
    for line in file.read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        reward = metrics.get("reward_mean")  # absent without rewards
        if reward is not None:
            click.echo(f"{metrics['step']:6}  {reward:6.3f}  {'#' * round(WIDTH * min(max(reward, 0), 1))}")
