"""The Ray cluster of a run: one that it joins, starts, or shares with its backend."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError, RunError
from rllm_core.text import one_line
from rllm_ray.config import RayConfig

# Ray reads these when it is imported. They disable usage reports to its developers, make a cluster started here listen
# on the loopback interface only, give workers the priority of the run, and make a joining driver send this machine's
# token for the cluster.
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}
OWN_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
JOINING_VARIABLES = {"RAY_AUTH_MODE": "token"}
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_FILE = ".ray/auth_token"
OBJECT_STORE_BYTES = 256 << 20  # for messages of more than 100 kB
MAX_SIGACTION_BYTES = 1024  # size of C's struct sigaction; 152 with glibc on x86-64


class Cluster:
    """A Ray cluster.

    Args:
        settings: Section ``[ray]`` of the run file.

    Attributes:
        token_note: Advice if no actor runs because this process sends a token and the cluster has none; empty if it
            sends none, or if the user has set this.
    """

    def __init__(self, settings: RayConfig) -> None:
        self._settings = settings
        # Ray's processes end with the thread that started them, so keep this thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rllm-ray")
        self._is_ours = False
        self.token_note = ""

    async def open(self, cpus: float) -> None:
        """Starts or joins Ray, unless this process has already done so.

        Args:
            cpus: CPUs that the run needs; a cluster started for the run always has them.

        Raises:
            ConfigError: If this process uses another cluster than ``ray.address``.
            RunError: If no cluster can be found or started.
        """
        await self._call(self._open, cpus)

    async def close(self) -> None:
        """Leaves the cluster. Stops it if the run started it, unless another part of this process uses it."""
        try:
            if self._is_ours:
                self._is_ours = False
                await self._call(_shut_down)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def free_cpus(self) -> float:
        """Number of unreserved CPUs in the cluster."""
        import ray

        resources: dict[str, float] = await self._call(ray.available_resources)
        return resources.get("CPU", 0.0)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _open(self, cpus: float) -> None:
        address = self._settings.address
        if _prepare(is_own=not address):
            self.token_note = "if the cluster works without the token of this machine, set RAY_AUTH_MODE=disabled"
        import ray

        if ray.is_initialized():
            there = ray.get_runtime_context().gcs_address
            if address not in ("", "auto", there):
                raise ConfigError(
                    f"ray.address = {address!r} is not the Ray cluster that this process uses, which is {there}; "
                    "leave it out"
                )
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address:
            options["address"] = address
        else:
            options |= {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": max(os.cpu_count() or 1, int(cpus) + 1),
                "num_gpus": 0,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            with _signal_handlers_kept():
                ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"at ray.address = {address!r}" if address else "could be started on this machine"
            raise RunError(f"no Ray cluster {where}: {one_line(error)}") from error
        self._is_ours = True


class _CoreWorker:
    """Ray's core worker of this process, without the call that frees an object."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def remove_object_ref_reference(self, reference: Any) -> None:
        """Does nothing."""


def _shut_down() -> None:
    """Shuts Ray down, while other threads may free objects.

    Ray ends the process if a thread frees an object after the core worker has shut down, and before Ray has forgotten
    it: the event loop does, when it drops the answers of workers.
    """
    import ray

    worker = ray._private.worker.global_worker
    worker.core_worker = _CoreWorker(worker.core_worker)
    ray.shutdown()


def _prepare(*, is_own: bool) -> bool:
    """Sets Ray's environment variables that the user has not set, unless Ray was already imported with others.

    Returns:
        Whether this function made the process send a token.
    """
    if "ray" in sys.modules:
        return False
    variables = dict(VARIABLES)
    sends_token = False
    if is_own:
        variables |= OWN_VARIABLES
    elif any(os.environ.get(name) for name in TOKEN_VARIABLES) or (Path.home() / TOKEN_FILE).is_file():
        variables |= JOINING_VARIABLES
        sends_token = not JOINING_VARIABLES.keys() & os.environ.keys()
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return sends_token


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM on exit.

    Ray's C++ code treats SIGTERM as a crash: it ends the run before the run can save anything. Python cannot see these
    handlers, so they are saved and restored through the C library.
    """
    library = ctypes.CDLL(None, use_errno=True)
    kept = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        kept[number] = ctypes.create_string_buffer(MAX_SIGACTION_BYTES)
        library.sigaction(int(number), None, kept[number])
    try:
        yield
    finally:
        for number, handler in kept.items():
            library.sigaction(int(number), handler, None)
