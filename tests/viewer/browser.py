"""Finds a Chromium for the tests, or installs one where it may: ``python tests/viewer/browser.py``.

``CHROMIUM`` names the program to take. Without it, one of the machine is taken, or else playwright's own; without any,
one is installed: as root with apt-get, or else playwright's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A sandbox of Chromium does not work for root, and the pages are our own; and it must not ask anybody for anything.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
INSTALL_SECONDS = 900
PLAYWRIGHT = (sys.executable, "-m", "playwright", "install", "chromium")


def found() -> str | None:
    """Returns the program of a browser that starts on this machine, or None."""
    if wanted := os.environ.get("CHROMIUM"):
        return shutil.which(wanted)
    programs = [program for name in NAMES if (program := shutil.which(name)) is not None]
    of_machine = next((program for program in programs if _starts(program)), None)
    return of_machine or next((program for program in _of_playwright() if _starts(program)), None)


def _of_playwright() -> list[str]:
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return [own] if Path(own).is_file() else []


def _starts(program: str) -> bool:
    """Returns whether it is a browser: Ubuntu's is only a note about snap, and playwright's may lack libraries."""
    done = subprocess.run([program, "--version"], check=False, capture_output=True, timeout=INSTALL_SECONDS)
    return done.returncode == 0


def installs() -> list[Sequence[Sequence[str]]]:
    """Returns the ways to install a browser here, each as its commands."""
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        install = ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]
        return [[["apt-get", "update"], install], [[*PLAYWRIGHT, "--with-deps"]]]
    return [[PLAYWRIGHT]]


def by_hand() -> str:
    """Returns the command that a person runs where the browser cannot be installed."""
    if shutil.which("apt-get") is None:
        return " ".join(PLAYWRIGHT)
    return "apt-get install chromium" if os.geteuid() == 0 else "sudo apt-get install chromium"


def _run(command: Sequence[str]) -> bool:
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_SECONDS, env=quiet
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    """Installs a browser if there is none."""
    wanted = os.environ.get("CHROMIUM")
    if wanted and found() is None:
        sys.exit(f"CHROMIUM = {wanted!r} is no program; unset it, or set it to the path of a Chromium")
    if found() is not None:
        return
    for commands in installs():
        print(f"installing Chromium: {' '.join(commands[-1])}", file=sys.stderr, flush=True)
        # A failed update need not matter: the lists may be there.
        done = [_run(command) for command in commands]
        if done[-1] and found() is not None:
            return
    sys.exit(f"the tests of the viewer need Chromium, which cannot be installed from here; run: {by_hand()}")


if __name__ == "__main__":
    main()
