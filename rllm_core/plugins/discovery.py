"""Finds installed plugins from metadata only. Imports no plugin."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import cast

import importlib_metadata
from importlib_metadata import Distribution

from rllm_core.providers import NAME_PATTERN
from rllm_core.text import printable

GROUP = "rllm_core"


@dataclass(frozen=True)
class Candidate:
    """One entry point of the group ``rllm_core``, not imported.

    Attributes:
        name: Name of the entry point, which is the name of the plugin.
        package: Distribution that the plugin comes from.
        version: Version of that distribution. Empty if the metadata has none.
        value: Module (or ``module:object``) with the hook implementations.
        error: Problem with the entry point itself, or None.
        is_malformed: Whether its ``entry_points.txt`` cannot be read. Other libraries fail on such a file too.
    """

    name: str
    package: str
    version: str
    value: str
    error: str | None = None
    is_malformed: bool = False
    entry_point: importlib_metadata.EntryPoint | None = field(default=None, compare=False, repr=False)

    @property
    def qualified(self) -> str:
        """``distribution/name``, which distinguishes plugins with the same name."""
        return f"{self.package}/{self.name}"

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.package} {self.version}".rstrip()

    @property
    def requires(self) -> tuple[str, ...]:
        """Requirements that the distribution declares, verbatim."""
        return declared_requirements(self._distribution) if self._distribution else ()

    @property
    def files(self) -> tuple[PurePosixPath, ...]:
        """Files that the distribution has installed; see `files_of`."""
        return files_of(self._distribution) if self._distribution else ()

    @property
    def _distribution(self) -> Distribution | None:
        return cast("Distribution | None", self.entry_point.dist if self.entry_point else None)

    def is_named(self, name: str) -> bool:
        """Whether ``name`` is this plugin's short name or ``distribution/name``."""
        package, slash, short = name.rpartition("/")
        return short == self.name and (not slash or self.is_from(package))

    def is_from(self, distribution: str) -> bool:
        """Whether this plugin comes from a distribution."""
        return normalized(distribution) == normalized(self.package)


def normalized(distribution: str) -> str:
    """Normalizes a distribution name for comparison."""
    return distribution.lower().replace("_", "-").replace(".", "-")


@cache
def installed_distributions() -> tuple[Distribution, ...]:
    """Returns every distribution on ``sys.path``; the path is searched once per process."""
    return tuple(cast("Iterable[Distribution]", importlib_metadata.distributions()))


@cache
def installed_plugins() -> tuple[Candidate, ...]:
    """Returns the plugins installed in this environment."""
    return find_plugins(installed_distributions())


@cache
def installed_versions() -> dict[str, str]:
    """Returns versions of installed distributions by normalized name; the first one on ``sys.path`` counts."""
    versions: dict[str, str] = {}
    for distribution in installed_distributions():
        name, version = identity(distribution)
        versions.setdefault(normalized(name), version)
    return versions


def find_plugins(distributions: Iterable[Distribution]) -> tuple[Candidate, ...]:
    """Returns the plugins' entry points in ``distributions``, sorted and without exact duplicates.

    A distribution can be listed twice (a symlinked ``lib64``, a stale ``egg-info``), so entries with equal
    distribution, name and value are merged. Other entries with equal names conflict; `rllm_core.plugins` reports that.
    """
    found: dict[tuple[str, str, str], Candidate] = {}
    for distribution in distributions:
        for candidate in _candidates(distribution):
            found.setdefault((normalized(candidate.package), candidate.name, candidate.value), candidate)
    return tuple(sorted(found.values(), key=lambda c: (c.name, c.package, c.value)))


def _candidates(distribution: Distribution) -> list[Candidate]:
    try:
        text = distribution.read_text("entry_points.txt") or ""
        # Check every distribution: libraries that read all entry points of this environment fail on a malformed line.
        problem = _malformed_line(text)
        every = distribution.entry_points if problem is None and GROUP in text else ()
        points = [point for point in every if point.group == GROUP]
    except Exception as error:  # one unreadable file must not hide every other plugin
        problem, points = f"{type(error).__name__}: {error}", []
    if problem is None and not points:
        return []
    package, version = identity(distribution)  # reads another file, so only for distributions with plugins
    if problem is not None:
        folder = getattr(distribution, "_path", None)
        where = f" ({folder})" if folder is not None else ""
        advice = f"its entry_points.txt{where} cannot be read: {problem}; fix it, or: pip uninstall {package}"
        return [Candidate(package, package, version, "", error=printable(advice), is_malformed=True)]
    return [
        Candidate(
            name=printable(point.name),
            package=package,
            version=version,
            value=printable(point.value),
            error=_entry_point_problem(point),
            entry_point=point,
        )
        for point in points
    ]


def _malformed_line(text: str) -> str | None:
    """Describes the first line that is neither a section, a comment nor ``name = value``."""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        is_section = line.startswith("[") and line.endswith("]")
        if line and not line.startswith("#") and not is_section and "=" not in line:
            return f"line {number}, {line[:80]!r}, has no '='"
    return None


def _entry_point_problem(point: importlib_metadata.EntryPoint) -> str | None:
    if not NAME_PATTERN.fullmatch(point.name):
        return printable(f"its entry point name {point.name!r} must match {NAME_PATTERN.pattern}")
    if not point.pattern.match(point.value):
        return printable(f"its entry point {point.name!r} is {point.value!r}, not a dotted path")
    return None


def identity(distribution: Distribution) -> tuple[str, str]:
    """Returns name and version of a distribution; if it is half removed, from the name of its folder."""
    try:
        metadata = distribution.metadata
        name, version = metadata["Name"], metadata["Version"]
    except Exception:
        name = version = None
    if not name:
        stem = Path(str(getattr(distribution, "_path", "unknown"))).stem
        name, _, fallback = stem.partition("-")
        version = version or fallback
    return printable(str(name)), printable(str(version or ""))


def declared_requirements(distribution: Distribution) -> tuple[str, ...]:
    """Returns the requirements that a distribution declares; empty if it is half removed, without readable metadata."""
    try:
        return tuple(distribution.requires or ())
    except (OSError, ValueError):
        return ()


def files_of(distribution: Distribution) -> tuple[PurePosixPath, ...]:
    """Returns the files that a distribution installed, even if deleted since; empty if the distribution is damaged."""
    try:
        record = distribution.read_text("RECORD") or ""  # distribution.files leaves out deleted files
        return tuple(PurePosixPath(row[0]) for row in csv.reader(record.splitlines()) if row)
    except (OSError, ValueError, csv.Error):
        return ()
