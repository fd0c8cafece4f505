"""Makes the pages and their generator importable."""

from __future__ import annotations

import os
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "docs")]
sys.path.append(str(Path(__file__).parents[2] / "plugins" / "rllm-viewer" / "tests"))  # recorded runs, to show them


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """Virtual environment for installations that also contains the packages of this one."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (site_packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    for command, module in (("pip", "pip"), ("pytest", "pytest"), ("rllm-core", "rllm_core")):
        script = folder / "bin" / command
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -P -m {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RLLM_PLUGINS", "PIP_", "PYTEST_"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return {**kept, **offline, "PATH": path, "RLLM_CONFIG_DIR": str(tmp_path / "config"), "COLUMNS": "200"}
