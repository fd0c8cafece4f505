"""The environment of a user after ``pip install``: our wheels and their dependencies, nothing of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


def needed(requirements: Iterable[str], known: Iterable[str]) -> dict[str, Distribution]:
    """Returns the installed distributions that the requirements reach, without ``known``."""
    found: dict[str, Distribution] = {}
    seen = {(canonicalize_name(name), frozenset[str]()) for name in known}
    queue = [(Requirement(text), frozenset[str]()) for text in requirements]
    while queue:
        requirement, extras = queue.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        wanted = [*extras, ""]
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
            continue
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution(requirement.name)
        queue += [(Requirement(text), key[1]) for text in found[key[0]].requires or ()]
    return found


def top_level(installed: Distribution) -> Iterator[Path]:
    """Returns the files and folders of a distribution at the top of ``site-packages``."""
    assert installed.files is not None, f"{installed.name} does not say what it has installed"
    root = Path(str(installed.locate_file("")))
    for name in sorted({file.parts[0] for file in installed.files}):
        if name not in ("..", "__pycache__") and not name.endswith(".pth"):
            yield root / name


class CleanEnvironment:
    """Virtual environment into which pip installs wheels offline.

    Third-party requirements are links to distributions installed for these tests: exactly those that the wheels'
    metadata reaches. An undeclared requirement is therefore missing, as on another machine.

    Args:
        folder: Folder of the environment.
        wheels: Wheels to install.
    """

    def __init__(self, folder: Path, wheels: Iterable[Path]) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.home = folder.with_name(f"{folder.name}-home")
        self.home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        [self.site_packages] = folder.glob("lib/python*/site-packages")
        third_party = folder / "third_party"
        third_party.mkdir()
        (self.site_packages / "third_party.pth").write_text(f"{third_party}\n", encoding="utf-8")
        wheels = list(wheels)
        for needs in needed(_requirements(wheels), [wheel.name.partition("-")[0] for wheel in wheels]).values():
            for path in top_level(needs):
                if not (third_party / path.name).exists():
                    (third_party / path.name).symlink_to(path)
        self.install(*wheels)

    def install(self, *wheels: Path) -> None:
        """Installs wheels; pip itself checks that their requirements are met."""
        pip = [*PIP, "--python", str(self.python), "install", "--no-index"]
        subprocess.run([*pip, *wheels], check=True, env=self._environ({}))

    def run(self, *command: str | Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, ``python`` or ``rllm-core``, in a separate folder.

        Args:
            command: The program and its arguments.
            code: Expected exit code.
            variables: Variables to add; those of Python and rllm-core are removed from the environment.
        """
        program, *arguments = command
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.home,
            env=self._environ(variables),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    def _environ(self, variables: dict[str, str]) -> dict[str, str]:
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RLLM_", "VIRTUAL_"))
        }
        for kept in ("RLLM_CACHE_DIR",):  # the starter model is built once per machine
            if kept in os.environ:
                environ[kept] = os.environ[kept]
        return {**environ, "RLLM_CONFIG_DIR": str(self.home), "PYTHONNOUSERSITE": "1", **variables}


def _requirements(wheels: Iterable[Path]) -> Iterator[str]:
    for wheel in wheels:
        with ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata, _ = parse_email(archive.read(name))
        yield from metadata.get("requires_dist", [])
