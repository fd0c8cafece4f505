"""Audits the environments of gymnasium, MiniGrid and BabyAI.

The audit plays every environment to its end with random legal actions, and runs all checks of a workflow on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_environments.gymnasium_text.environment import TextEnvironment, library, newest_of, refusal
from rllm_environments.gymnasium_text.observations import TEXT_VERSION
from rllm_environments.gymnasium_text.workflow import GymnasiumConfig, GymnasiumWorkflow
from rllm_environments.legal_play import failed_checks, play

MAX_ACTIONS = 100_000
COMPARED_ACTIONS = 100
CHECKED_TURNS = 12


def audits(variants: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the findings of the named environments, or of all registered ones in their newest version."""
    registry = library().registry
    newest = sorted({newest_of(list(registry), name) for name in registry})
    for name in variants or newest:
        yield name, _audited(name, registry[name])


def _audited(name: str, spec: Any) -> dict[str, Any]:
    refused = refusal(spec)
    try:
        environment = TextEnvironment(name)
        environment.check_play()
    except ConfigError as error:
        return {"refused": refused or str(error).partition(" is refused: ")[2] or str(error)}
    limit = environment.turn_limit
    found: dict[str, Any] = {
        "turns": "no limit" if limit is None else f"up to {limit}",
        "players": 1,
        "text_version": TEXT_VERSION,
        "actions": list(environment.actions or ()),
        "ends": _plays_to_its_end(environment),
    }
    is_repeatable = _texts(environment) == _texts(TextEnvironment(name))
    workflow = GymnasiumWorkflow(GymnasiumConfig(environment=name, train_tasks=1, validation_tasks=1))
    episode = play(workflow, workflow.tasks("train")[0], lambda rng: rng.choice(environment.actions or ()))
    found["held_out"] = workflow.splits.held_out
    found["rollout_turns"] = int(episode.metrics["turns"])
    failed = failed_checks(lambda: GymnasiumWorkflow(_checked(name)), environment.actions or ())
    passed = is_repeatable and not failed and not episode.metrics["no_action"] and found["ends"] is not None
    notes = failed + ["the same seed and actions do not give the same game"] * (not is_repeatable)
    if found["held_out"] == "nothing":
        notes.append("every seed starts alike, so nothing is held out")
    return {**found, "played": passed, "audited": passed, "notes": notes}


def _checked(name: str) -> GymnasiumConfig:
    return GymnasiumConfig(environment=name, max_turns=CHECKED_TURNS, train_tasks=2, validation_tasks=1)


def _plays_to_its_end(environment: TextEnvironment) -> int | None:
    """Returns the number of random actions after which a game ended, or None if it did not end."""
    rng = random.Random(0)
    environment.reset(0)
    for number in range(1, MAX_ACTIONS + 1):
        if environment.act(rng.choice(environment.legal_actions(rng))).is_over:
            return number
    return None


def _texts(environment: TextEnvironment) -> list[str]:
    rng = random.Random(1)
    texts = [environment.reset(7)]
    while len(texts) < COMPARED_ACTIONS:
        shown = environment.act(rng.choice(environment.legal_actions(rng)))
        texts.append(f"{shown}")
        if shown.is_over:
            break
    return texts
