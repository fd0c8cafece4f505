"""The names of the games of TextArena, from their committed audit; does not import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_environments.catalog import AuditFiles

AUDIT_FILES = AuditFiles("textarena", "textarena", "rllm_environments")


def variants() -> Sequence[str]:
    """Returns the ids of all games, without the forms that only show the same game otherwise."""
    return sorted(AUDIT_FILES.read().environments)


def findings(environment: str) -> Mapping[str, Any]:
    """Returns what the audit found about a game; empty if it is unknown."""
    return AUDIT_FILES.read().environments.get(environment, {})
