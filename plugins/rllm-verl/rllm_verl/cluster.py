"""The Ray cluster, and verl's worker groups on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ray
from omegaconf import DictConfig
from ray.exceptions import RayActorError, RayError

from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.text import one_line
from rllm_verl import verl_api
from rllm_verl.config import VerlConfig
from rllm_verl.memory import advice as memory_advice
from rllm_verl.resources import GROUPS_PER_DEVICE, shortage

ResultT = TypeVar("ResultT")

WORKER_MODULE = "rllm_verl.worker_process"
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
# Do not read programs that a different vLLM compiled.
ALWAYS = {"VLLM_DISABLE_COMPILE_CACHE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Weights sent through NCCL must not be in memory that NCCL allocated.
WHEN_SEPARATED = {"NCCL_CUMEM_ENABLE": "0"}
# Megatron overlaps communication by the order of kernel launches; verl's own trainer sets it too.
WITH_MEGATRON = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# Variables that workers on other machines get from this process, by name or prefix; never API keys.
FORWARDED = (
    "RLLM_PLUGINS",
    "RLLM_NO_PLUGINS",
    "RLLM_CONFIG_DIR",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
)
FORWARDED_PREFIXES = ("VERL_", "VLLM_", "NCCL_", "GLOO_", "TORCH_NCCL_")
KEY_SUFFIXES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")  # such as VLLM_API_KEY
# Workers request CPUs per device from Ray; a machine that runs nothing else need not have that many.
CPUS_PER_DEVICE = 16
DEVICES = {"cuda": "GPU", "npu": "NPU", "cpu": "GPU"}  # resource names in Ray; a CPU device is declared as a GPU
ALIVE_EVERY_SECONDS = 2.0
ABANDONED_CALL_SECONDS = 5.0  # for a call to end after its workers were killed
OWN_RAY_LOCK = "rllm-verl-ray.lock"
MAX_SIGACTION_BYTES = 1024  # size of C's struct sigaction; 152 with glibc on x86-64


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM on exit.

    Ray's C++ code treats SIGTERM as a crash: it prints a stack and ends the driver before the run can save anything.
    Python cannot see these handlers, so they are saved and restored through the C library.
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
    it: the event loop does, when it gets the answers of requests that were cancelled.
    """
    worker = ray._private.worker.global_worker
    worker.core_worker = _CoreWorker(worker.core_worker)
    ray.shutdown()


class Cluster:
    """A Ray cluster, joined or started for this run. Calls of verl's blocking API run in one dedicated thread.

    Args:
        config: Run file.
        settings: Section ``[verl]`` of the run file.
    """

    def __init__(self, config: RunConfig, settings: VerlConfig) -> None:
        self.config = config
        self.settings = settings
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rllm-verl")
        self._looking = threading.Lock()  # for workers that have died, in a thread that may outlive its call
        self._lock: int | None = None
        self._devices: Any = None
        self._workers: dict[str, Any] = {}  # by their names in error messages
        self._engines: dict[str, Any] = {}  # servers of those, by the names of their engines

    async def open(self) -> None:
        """Starts or joins Ray.

        Raises:
            RunError: If Ray does not start, or another run on this machine has started its own Ray.
        """
        # In the thread that lives as long as the cluster: Ray's processes end with the thread that started them.
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    def _open(self) -> None:
        runtime = {"env_vars": worker_environment(self.settings)}
        options: dict[str, Any] = {"runtime_env": runtime, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.settings.ray_address:
            options["address"] = self.settings.ray_address
        else:
            self._claim_machine()
            devices = self.settings.devices
            options |= {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": max(os.cpu_count() or 1, CPUS_PER_DEVICE * devices),
            }
            if self.settings.device == "cpu":
                options["num_gpus"] = devices  # Ray does not check that they exist
        try:
            with _signal_handlers_kept():
                ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = self.settings.ray_address or "started on this machine"
            raise RunError(f"no Ray cluster at verl.ray_address = {where!r}: {one_line(error)}") from error
        machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
        if missing := shortage(machines, self.settings, DEVICES[self.settings.device]):
            raise RunError(missing)

    def _claim_machine(self) -> None:
        """Locks this machine for one own Ray cluster.

        Two clusters on one machine use the same job numbers, and verl names its sockets by machine and job.
        """
        path = Path(tempfile.gettempdir()) / f"{OWN_RAY_LOCK}.{os.getuid()}"
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise RunError(
                "another run of backend 'verl' has started a Ray of its own on this machine, and the verl sockets of "
                "the two would collide: start one cluster (ray start --head), and set verl.ray_address = 'auto' in both"
            ) from None

    def start_workers(self, verl: DictConfig, role: str) -> Any:
        """Starts one of verl's worker groups on the trainers' devices, and loads its model."""
        from rllm_verl.worker import PolicyWorker

        settings = self.settings
        arguments = verl_api.use("RayClassWithInitArgs")(
            cls=ray.remote(PolicyWorker), config=verl.actor_rollout_ref, role=role, run=self.config
        )
        if self._devices is None:
            self._devices = verl_api.use("RayResourcePool")(
                process_on_nodes=[settings.devices_per_node] * settings.nodes, max_colocate_count=GROUPS_PER_DEVICE
            )
        group = verl_api.use("RayWorkerGroup")(
            resource_pool=self._devices, ray_cls_with_init=arguments, device_name=settings.device
        )
        called = "reference" if role == "ref" else "trainer"
        self.watch({f"{called} {rank}": handle for rank, handle in enumerate(group.workers)})
        group.init_model()
        return group

    def watch(self, workers: dict[str, Any]) -> None:
        """Adds actors, by name, whose death ends any running call."""
        self._workers = self._workers | workers  # a new one, because another thread may be reading the old one

    def watch_engines(self, servers: dict[str, Any]) -> None:
        """Adds servers, by the names of their engines: a server outlives its engine, and its calls may then wait."""
        self._engines = self._engines | servers

    async def call(self, what: str, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Runs a blocking call of verl; see `watched`."""
        return await self.watched(what, asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments))

    async def watched(self, what: str, call: asyncio.Future[ResultT]) -> ResultT:
        """Waits for a call; ends early if a watched worker or engine dies, because the call may wait for it.

        Raises:
            RunError: If a worker or an engine dies, or the call fails; the message starts with ``what``.
        """
        # Without this, asyncio prints the error of a call that nobody waits for any more, such as after a signal.
        call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        while True:
            done, _ = await asyncio.wait({call}, timeout=ALIVE_EVERY_SECONDS)
            if done:
                break
            if dead := await asyncio.to_thread(self.dead):
                raise RunError(f"{what}: {', '.join(dead)} died; Ray's logs say why ({self.log_folder()})")
        try:
            return await call
        except RayActorError as error:
            dead = await asyncio.to_thread(self.dead)
            raise RunError(f"{what}: {', '.join(dead) or 'a worker'} died: {reason(error)}") from error
        except RayError as error:
            why = reason(error)
            raise RunError(f"{what} failed in a worker: {why}{memory_advice(what, why)}") from error

    def dead(self) -> list[str]:
        """Returns the names of watched actors and engines that have died; none once the cluster is closed."""
        with self._looking:
            return self._dead() if ray.is_initialized() else []

    def _dead(self) -> list[str]:
        states = ray._private.state.actors
        dead = [name for name, each in self._workers.items() if states(each._actor_id.hex()).get("State") == "DEAD"]
        if dead or not self._engines:
            return dead
        asked = {server.has_dead_engine.remote(): name for name, server in self._engines.items()}
        # A server that is busy is asked again at the next look.
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ALIVE_EVERY_SECONDS)
        return [asked[answer] for answer in answered if _is_true(answer)]

    @staticmethod
    def log_folder() -> str:
        """Returns the folder of Ray's logs, which contain the workers' output."""
        node = ray._private.worker._global_node
        return "" if node is None else str(node.get_logs_dir_path())

    def close(self) -> None:
        """Ends the workers, and Ray if this process started it."""
        if ray.is_initialized():  # otherwise each call below would start a cluster
            for handle in self._workers.values():
                ray.kill(handle, no_restart=True)
            # A call that was abandoned would start a cluster with its next use of Ray.
            concurrent.futures.wait([self._thread.submit(int)], ABANDONED_CALL_SECONDS)
            with self._looking:
                _shut_down()
        self._workers, self._engines = {}, {}
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _is_true(answer: Any) -> bool:
    try:
        return bool(ray.get(answer))
    except RayActorError:  # the server died after its state was read
        return True


def worker_environment(settings: VerlConfig) -> dict[str, str]:
    """Returns the environment variables to set in every process of a run, on all machines."""
    names = [
        name
        for name in os.environ
        if name in FORWARDED
        or name in settings.environment
        or (name.startswith(FORWARDED_PREFIXES) and not name.endswith(KEY_SUFFIXES))
    ]
    variables = {name: os.environ[name] for name in sorted(names)}
    variables |= ALWAYS
    variables |= WHEN_SEPARATED if settings.placement == "separated" else {}
    if settings.strategy == "megatron":
        variables = WITH_MEGATRON | {name: os.environ[name] for name in WITH_MEGATRON if name in os.environ} | variables
    modules = [module for module in variables.get(MODULES_VARIABLE, "").split(",") if module]
    if WORKER_MODULE not in modules:
        modules.append(WORKER_MODULE)
    variables[MODULES_VARIABLE] = ",".join(modules)
    return variables


def reason(error: RayError) -> str:
    """Returns the cause of a worker failure in one line: the worker's own error, which ends Ray's text."""
    cause = getattr(error, "cause", None)
    return one_line(cause) if cause is not None else str(error).strip().rpartition("\n")[2].strip()
