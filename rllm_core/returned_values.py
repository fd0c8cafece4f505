"""Checks of values that third-party code returned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rllm_core.errors import RunError

ResultT = TypeVar("ResultT")


def checked(owner: str, check: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Returns ``check(*arguments)``, a check of what third-party code returned.

    ``check`` raises a ValueError that names the call; ``owner`` names the code.

    Raises:
        RunError: If the check fails.
    """
    try:
        return check(*arguments)
    except ValueError as error:
        raise RunError(f"{owner}: {error}") from error


def finite_numbers(returned: object, what: str) -> dict[str, float]:
    """Returns a mapping of names to finite numbers, with the numbers as floats. ``what`` names the call, for errors.

    Raises:
        ValueError: If it is anything else.
    """
    if not isinstance(returned, Mapping):
        raise ValueError(f"{what} returned {type(returned).__name__}, not a mapping of names to numbers")
    numbers = {}
    for name, value in returned.items():
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last from a tensor of several numbers
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{what} has {name!r:.80} = {value!r:.80}; return finite numbers")
        numbers[str(name)] = number
    return numbers


def json_object(returned: object, what: str) -> dict[str, Any]:
    """Returns a copy of a JSON object that a checkpoint restores unchanged. ``what`` names the call, for errors.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        restored: dict[str, Any] = json.loads(json.dumps(returned, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} returned a value that is not JSON: {error}") from error
    if not isinstance(returned, dict) or restored != returned:
        raise ValueError(
            f"{what} returned {returned!r:.80}; return a dict with string keys and JSON values, without tuples"
        )
    return restored
