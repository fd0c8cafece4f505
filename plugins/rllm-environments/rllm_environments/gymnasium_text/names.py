"""The names of the environments of gymnasium, MiniGrid and BabyAI, from their committed audit; imports neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_environments.catalog import AuditFiles

AUDIT_FILES = AuditFiles("gymnasium", "gymnasium", "rllm_environments")


def variants() -> Sequence[str]:
    """Returns the ids of all environments, each in its newest version."""
    return sorted(AUDIT_FILES.read().environments)


def findings(environment: str) -> Mapping[str, Any]:
    """Returns what the audit found about an environment; empty if it is unknown."""
    return AUDIT_FILES.read().environments.get(environment, {})
