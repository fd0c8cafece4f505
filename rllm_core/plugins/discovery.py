"""Finds installed plugins, and which of them may be used, from metadata and settings only. Imports no plugin."""

from __future__ import annotations

import csv
import json
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, cast

import importlib_metadata
from importlib_metadata import Distribution

from rllm_core.errors import PluginError
from rllm_core.providers import NAME_PATTERN
from rllm_core.text import printable

GROUP = "rllm_core"
NO_PLUGINS_VARIABLE = "RLLM_NO_PLUGINS"
EVERY_PLUGIN = "*"


@dataclass(frozen=True)
class Candidate:
    """One entry point of the group ``rllm_core``, not imported.

    Attributes:
        name: Name of the entry point, which is the name of the plugin.
        package: Distribution it comes from.
        version: Version of that distribution. Empty if the metadata has none.
        value: Module (or ``module:object``) with the hook implementations.
        error: Problem with the entry point itself, or None.
        is_malformed: Whether its ``entry_points.txt`` cannot be read. Other libraries fail on such a file too.
        entry_point: Entry point that loads it.
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
    """Every distribution on ``sys.path``, walked once per process."""
    return tuple(cast("Iterable[Distribution]", importlib_metadata.distributions()))


@cache
def installed_plugins() -> tuple[Candidate, ...]:
    """The plugins installed in this environment."""
    return find_plugins(installed_distributions())


@cache
def installed_versions() -> dict[str, str]:
    """Versions of installed distributions by normalized name; the first one on ``sys.path`` counts."""
    versions: dict[str, str] = {}
    for distribution in installed_distributions():
        name, version = identity(distribution)
        versions.setdefault(normalized(name), version)
    return versions


def find_plugins(distributions: Iterable[Distribution]) -> tuple[Candidate, ...]:
    """Entry points of the group in ``distributions``, sorted and without exact duplicates.

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
    package, version = identity(distribution)  # reads another file, so only of plugins
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
    """Name and version of a distribution. For a half-removed one, taken from its folder's name."""
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
    """Requirements that a distribution declares. Empty for a half-removed one, whose metadata cannot be read."""
    try:
        return tuple(distribution.requires or ())
    except (OSError, ValueError):
        return ()


def files_of(distribution: Distribution) -> tuple[PurePosixPath, ...]:
    """Files that a distribution has installed, including deleted ones. Empty for a damaged distribution."""
    try:
        record = distribution.read_text("RECORD") or ""  # distribution.files leaves out deleted files
        return tuple(PurePosixPath(row[0]) for row in csv.reader(record.splitlines()) if row)
    except (OSError, ValueError, csv.Error):
        return ()


# --------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class Settings:
    """Which plugins the user allows, read before any plugin is imported.

    Attributes:
        only: Names in ``RLLM_PLUGINS``, or None if it is unset.
        disabled: Names in ``plugins.toml``. Ignored if ``RLLM_PLUGINS`` is set.
        blocked: Names from ``--no-plugins=`` and ``RLLM_NO_PLUGINS``, or True for all. The variable passes them on to
            processes that a run starts.
        strict: Whether a broken, conflicting or missing plugin is an error even if it is not selected.
        trace: Whether every load and hook call is printed on stderr.
    """

    only: frozenset[str] | None = None
    disabled: frozenset[str] = frozenset()
    blocked: bool | frozenset[str] = False
    strict: bool = False
    trace: bool = False

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        no_plugins: bool | Collection[str] = False,
        strict: bool | None = None,
    ) -> Settings:
        """Reads the variables ``RLLM_PLUGINS...``, ``RLLM_NO_PLUGINS``, ``RLLM_TRACE_PLUGINS``, and ``plugins.toml``.

        Args:
            environ: Environment variables. Defaults to ``os.environ``.
            no_plugins: Plugins to block in addition to ``RLLM_NO_PLUGINS``: all, none, or these names.
            strict: Overrides ``RLLM_PLUGINS_STRICT``.

        Raises:
            PluginError: If a variable or the file is invalid.
        """
        environ = os.environ if environ is None else environ
        variable = environ.get("RLLM_PLUGINS")
        blocked = split_names(environ.get(NO_PLUGINS_VARIABLE, ""))
        if not isinstance(no_plugins, bool):
            blocked |= frozenset(no_plugins)
        return cls(
            only=None if variable is None else split_names(variable),
            disabled=frozenset() if variable is not None else read_disabled(environ),
            blocked=no_plugins is True or EVERY_PLUGIN in blocked or blocked or False,
            strict=_switch(environ, "RLLM_PLUGINS_STRICT") if strict is None else strict,
            trace=_switch(environ, "RLLM_TRACE_PLUGINS"),
        )

    def refusal(self, candidate: Candidate) -> str | None:
        """Reason why a plugin may not be used, or None."""
        if self.blocked is True or (self.blocked and any(map(candidate.is_named, self.blocked))):
            return "--no-plugins was given"
        if self.only is not None:
            return None if any(map(candidate.is_named, self.only)) else "RLLM_PLUGINS is set and does not name it"
        if any(map(candidate.is_named, self.disabled)):
            return f"disabled in plugins.toml; to re-enable it: rllm-core plugins enable {candidate.name}"
        return None

    def unknown(self, candidates: Iterable[Candidate]) -> list[tuple[str, str]]:
        """(source, name) of every requested name that is not installed."""
        known = list(candidates)
        asked = [("RLLM_PLUGINS", name) for name in self.only or ()]
        if not isinstance(self.blocked, bool):
            asked += [("--no-plugins", name) for name in self.blocked]
        return sorted(pair for pair in asked if not any(c.is_named(pair[1]) for c in known))


def split_names(text: str) -> frozenset[str]:
    """The names in a comma-separated list."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in {"", "0", "false", "no", "off"}:
        return False
    if value in {"1", "true", "yes", "on"}:
        return True
    raise PluginError(f"{name} = {value!r} must be 0 or 1")


def plugins_file(environ: Mapping[str, str] | None = None) -> Path:
    """Path of ``plugins.toml`` in ``$RLLM_CONFIG_DIR``. Defaults to ``~/.config/rllm-core``."""
    environ = os.environ if environ is None else environ
    folder = environ.get("RLLM_CONFIG_DIR")
    if folder:
        return Path(folder) / "plugins.toml"
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "rllm-core" / "plugins.toml"


def read_disabled(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Plugins disabled in ``plugins.toml``.

    Raises:
        PluginError: If the file exists but is invalid.
    """
    path = plugins_file(environ)
    advice = "Fix or delete the file, or set RLLM_PLUGINS, which overrides it"
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise PluginError(f"cannot read {path}: {error}. {advice}") from error
    disabled = table.pop("disabled", [])
    if table or not isinstance(disabled, list) or not all(isinstance(name, str) for name in disabled):
        raise PluginError(f'{path} must contain only disabled = ["NAME", ...]. {advice}')
    return frozenset(disabled)


def write_disabled(names: Collection[str], environ: Mapping[str, str] | None = None) -> Path:
    """Replaces ``plugins.toml`` atomically, and returns its path.

    Raises:
        PluginError: If it cannot be written.
    """
    path = plugins_file(environ)
    text = f"disabled = {json.dumps(sorted(names))}\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise PluginError(f"cannot write {path}: {error}") from error
    return path
