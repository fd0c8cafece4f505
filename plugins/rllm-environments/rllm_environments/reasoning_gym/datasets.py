"""The datasets of reasoning-gym, with the audit findings for the installed version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_environments import catalog

AUDIT_FILES = catalog.AuditFiles("reasoning_gym", "reasoning-gym", "rllm_environments")


def variants() -> Sequence[str]:
    """Returns the names of all datasets."""
    return sorted(AUDIT_FILES.read().environments)


def findings(environment: str) -> Mapping[str, Any]:
    """Returns the audit findings for a dataset; empty if it is unknown."""
    return AUDIT_FILES.read().environments.get(environment, {})


def installed_version() -> str:
    """Returns the installed version of reasoning-gym.

    Raises:
        ConfigError: If it is not installed.
    """
    version = catalog.installed_version(AUDIT_FILES.distribution)
    if version is None:
        raise ConfigError(
            "workflow 'reasoning_gym' needs reasoning-gym: pip install 'rllm-environments[reasoning-gym]'"
        )
    return version


def checked(environment: str) -> Mapping[str, Any]:
    """Returns the findings for a dataset, after checking that it can be used.

    Raises:
        ConfigError: If reasoning-gym is missing or differs from the audited version, or the dataset is unknown or
            failed its audit.
    """
    audit = AUDIT_FILES.read()
    installed = installed_version()
    if installed != audit.version:
        raise ConfigError(
            f"reasoning-gym {installed} has no audit; install reasoning-gym=={audit.version}, or audit the installed "
            "one: rllm-core environments audit reasoning_gym --write"
        )
    if environment not in audit.environments:
        raise catalog.unknown("reasoning_gym.environment", environment, audit.environments)
    found = audit.environments[environment]
    if found["refused"]:
        raise ConfigError(
            f"reasoning_gym.environment = {environment!r} failed its audit: {found['refused']}; choose another "
            "(rllm-core environments list reasoning_gym)"
        )
    return found
