"""Converts an exception of a rollout to the reason why the rollout failed."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from rllm_core.engine import EngineError, Terminated
from rllm_core.errors import Escaped, PluginError, RefusedConversation, UserError
from rllm_core.hosts.contract import RolloutFailed
from rllm_core.limits.timeouts import contained
from rllm_core.plugins.blame import blamed, defined_at
from rllm_core.text import printable
from rllm_core.types import Episode, Step, TerminationReason, Trajectory, well_formed

MAX_TRACEBACK_CHARACTERS = 8000


class Rejected(ValueError):
    """Error for an episode that training cannot use; not retried, since a retry would return the same episode."""


async def awaited(returned: object) -> object:
    """Awaits what ``run`` of a workflow returned, which must be a coroutine.

    Raises:
        Rejected: If it is none.
        Escaped: See `contained`.
    """
    if inspect.isasyncgen(returned):
        raise Rejected("run() must return the episode, but it has a yield; write return self.episode(...) instead")
    if not inspect.isawaitable(returned):
        kind = type(returned).__name__
        raise Rejected(f"run() must be a coroutine function (async def run), but returned {kind} without one")
    return await contained(returned)


def coroutine_of(method: Callable[[], Awaitable[None]]) -> Awaitable[None]:
    """Calls ``open`` or ``close`` of a workflow, which must be a coroutine function.

    Raises:
        PluginError: If it is none.
    """
    returned = method()
    if not inspect.isawaitable(returned):
        name, place = method.__name__, defined_at(method)
        raise PluginError(f"{name}() of the workflow ({place}) must be a coroutine function; write async def {name}")
    return returned


def ends_run(error: BaseException) -> bool:
    """Whether only the user can fix the problem, such as an invalid run file: the next rollout would fail, too."""
    return isinstance(error, UserError) and not isinstance(error, RefusedConversation)


def failure_of(error: BaseException) -> RolloutFailed:
    """Describes the failure of a rollout that raised ``error``."""
    if isinstance(error, RolloutFailed):
        return error
    if isinstance(error, Terminated):
        return RolloutFailed(error.reason, str(error))
    if isinstance(error, TimeoutError):
        return RolloutFailed(TerminationReason.TIMEOUT, blamed(error))
    if isinstance(error, EngineError):
        return RolloutFailed(TerminationReason.ENGINE_ERROR, str(error))
    if isinstance(error, Rejected):
        return RolloutFailed(TerminationReason.ERROR, str(error), is_final=True)
    raised = error.__cause__ if isinstance(error, Escaped) and error.__cause__ is not None else error
    trace = well_formed("".join(traceback.format_exception(raised)))[-MAX_TRACEBACK_CHARACTERS:]
    # The message of a refusal says who refused; the line of the workflow's call did nothing wrong.
    what = printable(str(raised)) if isinstance(raised, RefusedConversation) else blamed(raised)
    if isinstance(raised, AttributeError | TypeError) and "'coroutine'" in str(raised):
        what += "; is an await missing, as in await completer.complete(...)?"
    return RolloutFailed(TerminationReason.ERROR, what, traceback=trace, is_final=_is_final(error))


def _is_final(error: BaseException) -> bool:
    """Whether a retry would fail in the same way: a record of the rollout has invalid fields."""
    return isinstance(error, ValidationError) and error.title in {
        record.__name__ for record in (Episode, Trajectory, Step)
    }
