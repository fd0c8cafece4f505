"""Names of the environments of gymnasium, MiniGrid and BabyAI, from their committed audit, without importing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_environments.catalog import AuditFiles

AUDIT_FILES = AuditFiles("gymnasium", "gymnasium", "rllm_environments")


def variants() -> Sequence[str]:
    """Returns the ids of all environments, each in its newest version."""
    return sorted(AUDIT_FILES.read().environments)


def findings(environment: str) -> Mapping[str, Any]:
    """Returns the audit findings for an environment; empty if it is unknown."""
    return AUDIT_FILES.read().environments.get(environment, {})
