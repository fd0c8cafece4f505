"""The catalog of environments and their audit findings: one JSON file per ecosystem and package version.

``rllm-core environments audit`` writes the audits, and they are committed. Listing and describing read only these
files, so they work without the packages that contain the environments.
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
NAMES_SHOWN = 5


@dataclass(frozen=True)
class Audit:
    """The findings of an audit.

    Attributes:
        ecosystem: Name of the workflow.
        version: Version of the package that was audited.
        environments: Findings by environment. `Description` has the findings that all ecosystems share.
    """

    ecosystem: str
    version: str
    environments: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Description:
    """The description of an environment that ``rllm-core environments`` shows.

    Attributes:
        name: Name of the environment, the ``environment`` key of the workflow's section.
        turns: Turns of a rollout, such as "1" or "up to 30".
        players: Number of players, 1 if the policy plays alone.
        needs: Requirements besides its package: data, a key, a sandbox.
        audited: Whether an audit passed.
        played: Whether the audit played whole rollouts with legal answers.
        refused: Why a run refuses the environment, or None.
        notes: Further remarks.
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
        """Reads the part of an environment's findings that all ecosystems share."""
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
    """Returns the version of an installed distribution, or None. Modules often report an outdated version."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class AuditFiles:
    """The committed audits of an ecosystem, one file per version of its package: ``audits/ECOSYSTEM-VERSION.json``.

    If a workflow class sets ``audit_files`` to this, ``rllm-core environments audit ECOSYSTEM --write`` works.

    Attributes:
        ecosystem: Name of the workflow.
        distribution: Distribution that contains the environments.
        package: Package whose folder ``audits`` contains the files.
    """

    ecosystem: str
    distribution: str
    package: str

    def read(self) -> Audit:
        """Returns the audit of the installed version, else of the newest audited version; empty if there is none."""
        return _read(self)

    def write(self, environments: Mapping[str, Mapping[str, Any]]) -> Path:
        """Writes the audit of the installed version and returns its file.

        Raises:
            ConfigError: If the distribution is not installed, or the folder is not writable.
        """
        version = installed_version(self.distribution)
        if version is None:
            raise ConfigError(f"{self.distribution} is not installed: pip install {self.distribution}")
        folder = Path(str(resources.files(self.package))) / FOLDER
        path = folder / f"{self.ecosystem}-{version}.json"
        head = {"ecosystem": self.ecosystem, "distribution": self.distribution, "version": version}
        start = json.dumps(head, indent=1).removesuffix("\n}")
        lines = [f"  {json.dumps(n)}: {json.dumps(environments[n], sort_keys=True)}" for n in sorted(environments)]
        text = start + ',\n "environments": {\n' + ",\n".join(lines) + "\n }\n}\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
        _read.cache_clear()
        return path


def unknown(key: str, name: str, names: Iterable[str]) -> ConfigError:
    """Returns the error for a name that an ecosystem does not have."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=3)
    some = (
        f"did you mean {' or '.join(near)}?" if near else f"it has {len(known)}: {', '.join(known[:NAMES_SHOWN])} ..."
    )
    return ConfigError(f"{key} = {name!r:.80} is not the name of an environment; {some}")


@cache
def _read(of: AuditFiles) -> Audit:
    files = dict(_files(of))
    if not files:
        return Audit(of.ecosystem, "", {})
    installed = installed_version(of.distribution)
    version = installed if installed in files else max(files, key=_parts)
    return Audit(of.ecosystem, version, json.loads(files[version].read_text(encoding="utf-8"))["environments"])


def _files(of: AuditFiles) -> Iterable[tuple[str, Traversable]]:
    folder = resources.files(of.package) / FOLDER
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.name.startswith(f"{of.ecosystem}-") and file.name.endswith(".json"):
            yield file.name.removeprefix(f"{of.ecosystem}-").removesuffix(".json"), file


def _parts(version: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in version.split("."))
