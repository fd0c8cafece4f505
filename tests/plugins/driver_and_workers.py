"""Run by test_workers.py: prints the plugins that this process and two child processes see."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import asdict
from typing import Any


def seen() -> dict[str, Any]:
    """Returns every plugin with its state, and every record that can be selected."""
    from rllm_core.plugins import PluginManager
    from rllm_core.providers import KINDS

    plugins = PluginManager.from_environment()
    records = {
        f"{kind.kind} {name}": {**asdict(provided.record), "of": provided.plugin.label}
        for kind in KINDS
        for name, provided in plugins.providers(kind).items()
    }
    return {"plugins": [info.to_json() for info in plugins.plugins()], "records": records}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(seen()))
    else:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            spawned = pool.apply(seen)
        started = subprocess.run([sys.executable, __file__, "worker"], check=True, capture_output=True, text=True)
        print(json.dumps({"driver": seen(), "spawned": spawned, "started": json.loads(started.stdout)}))
