"""Merges tables of run files: if a table replaces a component, the options of the old component are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_core.assembly.placement import INLINE, WORKER_KEYS
from rllm_core.run_file import merged

OPTIONS_OF = (
    ("name", "estimator_options"),
    ("loss", "loss_options"),
    ("group_scorer", "group_scorer_options"),
    ("sampler", "sampler_options"),
)


def merged_by_choice(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges ``over`` into ``base``, without the options of components, and of workers, that ``over`` replaces."""
    for section in ("algorithm", "training"):
        before, after = base.get(section), over.get(section)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            base = {**base, section: _still_chosen(before, after)}
    before, after = base.get("rollout"), over.get("rollout")
    if isinstance(before, Mapping) and isinstance(after, Mapping) and after.get("host") == INLINE:
        base = {**base, "rollout": {key: before[key] for key in before if key not in WORKER_KEYS}}
    return merged(base, over)


def _still_chosen(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section, or a role of it, without the options of components that ``after`` replaces."""
    left = dict(before)
    for choice, options in OPTIONS_OF:
        if choice in after and after[choice] != before.get(choice):
            left.pop(options, None)
    chosen, tables = after.get("corrections"), before.get("correction_options")
    if isinstance(chosen, list) and isinstance(tables, Mapping):
        left["correction_options"] = {name: tables[name] for name in tables if name in chosen}
    roles, others = before.get("roles"), after.get("roles")
    if isinstance(roles, Mapping) and isinstance(others, Mapping):
        both = {role for role in roles if isinstance(roles[role], Mapping) and isinstance(others.get(role), Mapping)}
        left["roles"] = {
            role: _still_chosen(roles[role], others[role]) if role in both else roles[role] for role in roles
        }
    return left
