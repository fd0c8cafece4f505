"""Names of the games of TextArena, from their committed audit, without importing TextArena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_environments.catalog import AuditFiles

AUDIT_FILES = AuditFiles("textarena", "textarena", "rllm_environments")


def variants() -> Sequence[str]:
    """Returns the ids of all games, without variants that only display the same game differently."""
    return sorted(AUDIT_FILES.read().environments)


def findings(environment: str) -> Mapping[str, Any]:
    """Returns the audit findings for a game; empty if it is unknown."""
    return AUDIT_FILES.read().environments.get(environment, {})
