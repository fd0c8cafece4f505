"""Finds a Chromium for the tests, or installs playwright's own: ``python tests/viewer/browser.py``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """Returns the program of a browser on this machine, or None."""
    for name in NAMES:
        if (program := shutil.which(name)) is not None:
            return program
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).is_file() else None


def main() -> None:
    """Installs a browser if there is none."""
    if found() is not None:
        return
    command = [sys.executable, "-m", "playwright", "install", "chromium"]
    if subprocess.run(command, check=False).returncode or found() is None:
        sys.exit(f"the tests of the viewer need Chromium; run: apt-get install chromium, or: {' '.join(command)}")


if __name__ == "__main__":
    main()
