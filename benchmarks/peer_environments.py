"""Environments of benchmarks: one thread, no model hub, and the peer of the comparison installed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEER_ENVIRONMENT = ROOT / ".venv-bench"
PEERS = ("trl==1.16.0", "cosmic-ray==8.7.0", "numba==0.68.1")
PACKAGES = (".", *(f"plugins/rllm-{name}" for name in ("devkit", "local", "renderers", "viewer", "workflows")))

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
"""Environment variables to set early: OpenMP reads its own once, when the first library that uses it is loaded."""


def enter_peer_environment(module: str, arguments: list[str]) -> None:
    """Restarts a benchmark in the environment with the peer; creates that environment if needed.

    Args:
        module: Module of the benchmark.
        arguments: Command-line arguments.
    """
    os.environ.update(SETTINGS)
    if Path(sys.prefix).resolve() == PEER_ENVIRONMENT.resolve():
        return
    python = make_peer_environment()
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", module, *arguments])


def make_peer_environment() -> Path:
    """Installs torch, TRL, cosmic-ray, the core and the plugins in ``.venv-bench``; quick if it is up to date.

    Returns:
        Path of its Python interpreter.
    """
    python, stamp = PEER_ENVIRONMENT / "bin" / "python", PEER_ENVIRONMENT / ".installed"
    wanted = _fingerprint()
    (ROOT / "bench").mkdir(exist_ok=True)
    with (ROOT / "bench" / ".environment.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return python
        print(f"setting up {PEER_ENVIRONMENT.name} (some minutes the first time)", file=sys.stderr, flush=True)
        stamp.unlink(missing_ok=True)
        if not _runs(python):
            _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(PEER_ENVIRONMENT))
        # Install torch first, with an exact pin: other versions would pull in CUDA.
        _install(python, "-c", "constraints.txt", "torch", "hatchling", "editables")
        editable = [argument for package in PACKAGES for argument in ("-e", package)]
        _install(python, "-c", "constraints.txt", "--no-build-isolation", *PEERS, *editable)
        stamp.write_text(wanted)
    return python


def _fingerprint() -> str:
    """Returns a hash of everything the environment depends on."""
    files = ["constraints.txt", *(f"{package}/pyproject.toml" for package in PACKAGES)]
    parts = [*PEERS, sys.version, *(Path(ROOT, file).read_text(encoding="utf-8") for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _runs(python: Path) -> bool:
    return python.exists() and subprocess.run([python, "-c", ""], check=False).returncode == 0


def _install(python: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    _run(*pip, *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
