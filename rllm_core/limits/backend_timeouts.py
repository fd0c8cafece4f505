"""Timeouts of a backend's calls."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar, cast

from rllm_core.backend import BackendProtocol
from rllm_core.config import RunConfig
from rllm_core.limits.timeouts import within

BackendT = TypeVar("BackendT", bound=BackendProtocol[Any])

_COROUTINES = frozenset(name for name, method in vars(BackendProtocol).items() if inspect.iscoroutinefunction(method))


class _WithTimeouts:
    def __init__(self, backend: BackendProtocol[Any], config: RunConfig) -> None:
        self._backend = backend
        self._config = config

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if name not in _COROUTINES:
            return attribute
        training = self._config.training
        is_sync = name == "on_policy_updated"
        seconds = training.sync_timeout_seconds if is_sync else training.backend_timeout_seconds
        what = f"{name} of backend {self._config.backend!r}"
        return lambda *arguments, **options: within(seconds, what, attribute(*arguments, **options))


def with_timeouts(backend: BackendT, config: RunConfig) -> BackendT:
    """Returns a backend whose coroutine methods raise `rllm_core.errors.StallError` if they take too long.

    The limit is ``training.sync_timeout_seconds`` for ``on_policy_updated`` and ``training.backend_timeout_seconds``
    for all other methods.
    """
    return cast(BackendT, _WithTimeouts(backend, config))
