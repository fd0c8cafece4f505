"""Environments by name, and what their audits found: one JSON file per ecosystem and version of its package.

An audit is made by ``rllm-core environments audit``, and committed. Listing and describing read these files only, so
they work without the packages that have the environments.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError

FOLDER = "audits"
PACKAGE = "rllm_environments"
NAMES_SHOWN = 5


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        ecosystem: Name of the workflow.
        version: Version of the package that was audited.
        environments: Findings by environment. Those that every ecosystem has are in `Description`.
    """

    ecosystem: str
    version: str
    environments: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Description:
    """What ``rllm-core environments`` shows of an environment.

    Attributes:
        name: Name, the ``environment`` of the workflow's section.
        turns: Turns of a rollout, such as "1" or "up to 30".
        players: Players of a game, 1 if the policy is alone.
        needs: What it needs besides its package: data, a key, a sandbox.
        audited: Whether an audit passed.
        played: Whether the audit played whole rollouts, with legal answers.
        refused: Why a run refuses it; None if it does not.
        notes: What else to know.
    """

    name: str
    turns: str = "1"
    players: int = 1
    needs: tuple[str, ...] = ()
    audited: bool = False
    played: bool = False
    refused: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, found: Mapping[str, Any]) -> Description:
        """Reads the common part of an environment's findings."""
        return cls(
            name=name,
            turns=str(found.get("turns", "1")),
            players=int(found.get("players", 1)),
            needs=tuple(found.get("needs", ())),
            audited=bool(found.get("audited", False)),
            played=bool(found.get("played", False)),
            refused=found.get("refused"),
            notes=tuple(found.get("notes", ())),
        )


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None. Modules often state an older one."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def read_audit(ecosystem: str, distribution: str, package: str = PACKAGE) -> Audit:
    """Returns the audit of the installed version, or else of the newest audited one.

    Args:
        ecosystem: Name of the workflow.
        distribution: Distribution with the environments.
        package: Package whose folder ``audits`` has the file.
    """
    files = dict(_files(ecosystem, package))
    if not files:
        return Audit(ecosystem, "", {})
    installed = installed_version(distribution)
    version = installed if installed in files else max(files, key=_parts)
    found = json.loads(files[version].read_text(encoding="utf-8"))
    return Audit(ecosystem, version, found["environments"])


def write_audit(audit: Audit, distribution: str, folder: Path) -> Path:
    """Writes an audit into a folder and returns its file.

    Raises:
        ConfigError: If the folder is not writable.
    """
    path = folder / f"{audit.ecosystem}-{audit.version}.json"
    environments = {name: audit.environments[name] for name in sorted(audit.environments)}
    lines = [f"  {json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in environments.items()]
    head = {"ecosystem": audit.ecosystem, "distribution": distribution, "version": audit.version}
    start = json.dumps(head, indent=1).removesuffix("\n}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(
            start + ',\n "environments": {\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8", newline="\n"
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def audit_folder(package: str = PACKAGE) -> Path:
    """Returns the folder of a package's audits."""
    return Path(str(resources.files(package))) / FOLDER


def unknown(key: str, name: str, names: Iterable[str]) -> ConfigError:
    """Returns the error of a name that an ecosystem does not have."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=3)
    some = (
        f"did you mean {' or '.join(near)}?" if near else f"it has {len(known)}: {', '.join(known[:NAMES_SHOWN])} ..."
    )
    return ConfigError(f"{key} = {name!r:.80} is not the name of an environment; {some}")


def _files(ecosystem: str, package: str) -> Iterable[tuple[str, Traversable]]:
    folder = resources.files(package) / FOLDER
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.name.startswith(f"{ecosystem}-") and file.name.endswith(".json"):
            yield file.name.removeprefix(f"{ecosystem}-").removesuffix(".json"), file


def _parts(version: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in version.split("."))
