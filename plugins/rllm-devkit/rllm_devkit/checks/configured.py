"""Runs the contract checks of a component with options: an estimator, a correction or a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from rllm_core.algorithms.options import Configured
from rllm_core.config import Section
from rllm_core.plugins.blame import blamed
from rllm_devkit.checks.results import CheckResult, NotApplicable, Violation

PieceT = TypeVar("PieceT", bound=Configured)
Check = Callable[[PieceT, np.random.Generator, int], str]
"""Check of a component: takes the number of examples to draw, and returns its finding.

Raises `Violation` if the component violates its contract."""

EXAMPLES = 30


def checked(piece: PieceT, checks: Mapping[str, Check[PieceT]], seed: int, examples: int) -> list[CheckResult]:
    """Runs checks, each with its own random generator."""
    piece.describe = blamed
    return [_result(name, check, piece, seed, examples) for name, check in {"options": options, **checks}.items()]


def _result(name: str, check: Check[PieceT], piece: PieceT, seed: int, examples: int) -> CheckResult:
    try:
        return CheckResult(name, "passed", check(piece, np.random.default_rng(seed), examples))
    except NotApplicable as reason:
        return CheckResult(name, "skipped", str(reason))
    except Violation as problem:
        return CheckResult(name, "failed", str(problem))
    except Exception as error:  # an error in one check must not stop the others
        return CheckResult(name, "failed", " ".join(f"raised {type(error).__name__}: {error}".split()))


def options(piece: Configured, rng: np.random.Generator, examples: int) -> str:
    """Checks that every option is documented and that unknown options are rejected."""
    model = piece.options_model
    if not issubclass(model, Section):
        raise Violation(f"{model.__name__} must subclass rllm_core.config.Section, or unknown keys would be ignored")
    silent = [name for name, field in model.model_fields.items() if not field.description]
    if silent:
        raise Violation(f"{model.__name__}: add Field(description=...) to {', '.join(silent)}")
    if not isinstance(piece.options, model):
        raise Violation(f"options must be a {model.__name__}, got a {type(piece.options).__name__}")
    return ", ".join(model.model_fields) or "none"
