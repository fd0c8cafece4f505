"""Finds unmet requirements of installed distributions, and advises how to meet them. Uses metadata only."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from importlib_metadata import Distribution
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from rllm_core.errors import ApiVersionError
from rllm_core.plugins.blame import passed_through, place_of
from rllm_core.plugins.discovery import (
    Candidate,
    declared_requirements,
    files_of,
    identity,
    installed_distributions,
    installed_plugins,
    installed_versions,
    normalized,
)


@dataclass(frozen=True)
class Missing:
    """A declared requirement that is not met.

    Attributes:
        requirement: Requirement for pip, without markers.
        needed_by: Distribution that declares it.
    """

    requirement: str
    installed: str | None
    needed_by: str

    def __str__(self) -> str:
        found = f"{self.installed} is installed" if self.installed else "it is not installed"
        return f"{self.needed_by} needs {self.requirement}, but {found}"


def unmet(needed_by: str, requires: Iterable[str], *, extras: Iterable[str] = ()) -> list[Missing]:
    """Returns the direct requirements of a distribution that this environment does not meet."""
    versions = installed_versions()
    return [
        Missing(_without_marker(requirement), versions.get(normalized(requirement.name)), needed_by)
        for requirement in _applicable(requires, extras)
        if not _is_met(requirement, versions)
    ]


def unmet_closure(needed_by: str, requires: Iterable[str]) -> list[Missing]:
    """Like `unmet`, but also for everything that the distribution depends on."""
    distributions: dict[str, Distribution] = {}
    for distribution in installed_distributions():
        distributions.setdefault(normalized(identity(distribution)[0]), distribution)
    missing: dict[tuple[str, str], Missing] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue: list[tuple[str, tuple[str, ...], frozenset[str]]] = [(needed_by, tuple(requires), frozenset())]
    while queue:
        name, declared, extras = queue.pop(0)
        for lack in unmet(name, declared, extras=extras):
            missing.setdefault((lack.needed_by, lack.requirement), lack)
        for requirement in _applicable(declared, extras):
            key = (normalized(requirement.name), frozenset(requirement.extras))
            if key[0] in distributions and key not in seen:
                seen.add(key)
                found = distributions[key[0]]
                queue.append((identity(found)[0], declared_requirements(found), key[1]))
    return list(missing.values())


def remedy(candidate: Candidate, error: BaseException) -> str | None:
    """Returns advice on how to fix a plugin that failed; None if the user cannot, as with a mistake in its code."""
    malformed = next((candidate for candidate in installed_plugins() if candidate.is_malformed), None)
    if malformed is not None and passed_through(error, "importlib.metadata", "importlib_metadata"):
        return f"plugin {malformed.name!r} ({malformed.label}) is the cause: {malformed.error}"
    if isinstance(error, ApiVersionError):
        return _to_mend_it("--upgrade", "rllm-core" if error.is_core_older else candidate.package)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing_module(candidate, error.name)
    if isinstance(error, ImportError):  # possibly a name that only another version has
        lacking = unmet_closure(candidate.package, candidate.requires)
    elif isinstance(error, AttributeError | TypeError) and place_of(error) is not None:
        lacking = unmet(candidate.package, candidate.requires)
    else:
        return None
    return _to_install(lack for lack in lacking if lack.installed)


def _missing_module(candidate: Candidate, module: str) -> str | None:
    root = module.partition(".")[0]
    if root == candidate.value.partition(":")[0].partition(".")[0].strip():
        is_torn = not candidate.files if module == root else False  # half removed: its files are unknown
        reinstalled = is_torn or _has(candidate.files, module)
        return _to_mend_it("--force-reinstall", "--no-deps", candidate.package) if reinstalled else None
    if root in sys.stdlib_module_names:
        return None
    lacking = unmet_closure(candidate.package, candidate.requires)
    of_that_name = [lack for lack in lacking if normalized(Requirement(lack.requirement).name) == normalized(root)]
    if lacking:
        return _to_install(of_that_name or lacking)
    for distribution in installed_distributions():
        name = identity(distribution)[0]
        if normalized(name) == normalized(root) and _has(files_of(distribution), module):
            return _to_mend_it("--force-reinstall", name)
    return (
        f"no requirement of {candidate.package} provides module {root!r}; install a package that does, and report this "
        "to its authors"
    )


def _has(files: Iterable[PurePosixPath], module: str) -> bool:
    path = PurePosixPath(*module.split("."))
    return not {path.with_suffix(".py"), path / "__init__.py"}.isdisjoint(files)


def _to_install(lacking: Iterable[Missing]) -> str | None:
    lacking = list(lacking)
    if not lacking:
        return None
    outdated = "; ".join(str(lack) for lack in lacking if lack.installed)
    return _to_mend_it(*(lack.requirement for lack in lacking)) + (f" ({outdated})" if outdated else "")


def _to_mend_it(*arguments: str) -> str:
    return f"to fix it: {pip_install(*arguments)}"


def pip_install(*arguments: str) -> str:
    """Returns a ``pip install`` command that can be pasted into a shell."""
    return shlex.join(["pip", "install", *arguments])


def matches(requirement: str, versions: Mapping[str, str]) -> bool:
    """Whether the named distribution is installed in a version that satisfies ``requirement``."""
    return _is_met(Requirement(requirement), versions)


def _applicable(requires: Iterable[str], extras: Iterable[str]) -> Iterator[Requirement]:
    wanted = [*extras, ""]
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # pip rejects such a distribution too, and there is nothing to check
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
            yield requirement


def _is_met(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    version = versions.get(normalized(requirement.name))
    if version is None:
        return False
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _without_marker(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"
