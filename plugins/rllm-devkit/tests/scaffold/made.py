"""Names and environment of the generated packages."""

from __future__ import annotations

import os
from pathlib import Path

# One name per kind, deliberately with different separators.
NAMES = {
    "workflow": "spell-back",
    "backend": "tiny_table",
    "engine": "dice",
    "parser": "plain-chatml",
    "tracker": "csv_file",
    "loss": "soft_ratio",
    "reward": "letters-in-place",
    "estimator": "from_median",
    "correction": "slow-fade",
    "scorer": "rank_in_group",
    "sampler": "unsolved_first",
    "sandbox": "own_folder",
    "command": "reward-bars",
    "observer": "step_lines",
}


def environment(folder: Path, site: Path | None) -> dict[str, str]:
    """Returns this environment with another folder of packages and without user settings."""
    inherited = {key: value for key, value in os.environ.items() if key != "RLLM_PLUGINS"}
    paths = [*([] if site is None else [str(site)]), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "RLLM_CONFIG_DIR": str(folder / "config")}
