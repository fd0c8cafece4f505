"""verl on a CPU: a platform for its registry, and three patches for behavior without an option in verl or vLLM.

Loaded in every process through ``VERL_USE_EXTERNAL_MODULES``, and selected with ``VERL_PLATFORM=cpu``. Ray assigns
logical GPUs (``ray.init(num_gpus=...)``), so verl's placement is the same as on a machine with GPUs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed
import torch.distributed.fsdp
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> ModuleType:
    """``torch.cpu``, plus the functions of ``torch.cuda`` that verl calls."""
    module = ModuleType("torch_cpu_as_accelerator")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})

    def nothing(*arguments: Any, **options: Any) -> None:
        """Does nothing: there is no cache, no allocator and no second device."""

    def no_bytes(*arguments: Any) -> int:
        return 0

    def free_and_total_bytes(*arguments: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def device_name(*arguments: Any) -> str:
        return "cpu"

    def get_rng_state(*arguments: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *arguments: Any) -> None:
        torch.set_rng_state(state)

    functions: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
        (nothing, ("empty_cache", "ipc_collect")),
        (no_bytes, ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")),
        (free_and_total_bytes, ("mem_get_info",)),
        (device_name, ("get_device_name",)),
        (get_rng_state, ("get_rng_state",)),
        (set_rng_state, ("set_rng_state",)),
    )
    for function, names in functions:
        for name in names:
            setattr(module, name, function)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One CPU per process, with gloo for communication."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]  # verl only passes it to `.to()` and to FSDP
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Does nothing: the settings are CUDA's."""

    def empty_cache(self) -> None:
        """Does nothing: there is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Does nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Does nothing: there is no device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _accept_one_backend_named_twice() -> None:
    """verl requests ``cpu:gloo,<device>:<backend>``; with device cpu, torch rejects the repeated device."""
    original = torch.distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        original("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **options)

    torch.distributed.init_process_group = init_process_group


def _keep_weights_of_linear_layers() -> None:
    """vLLM packs each weight for oneDNN and discards the original, so a weight sync could not load into it.

    Its processes import vLLM before verl (whose worker extension they load), and both before the model.
    """
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def _offload_to_memory_that_is_not_pinned() -> None:
    """FSDP2 offloads a sharded reference to pinned memory, which torch supports only with an accelerator."""

    class CPUOffloadPolicy(torch.distributed.fsdp.CPUOffloadPolicy):
        def __init__(self, pin_memory: bool = True) -> None:
            super().__init__(pin_memory=False)

    torch.distributed.fsdp.CPUOffloadPolicy = CPUOffloadPolicy  # type: ignore[misc]


_accept_one_backend_named_twice()
_offload_to_memory_that_is_not_pinned()
if "vllm" in sys.modules:
    _keep_weights_of_linear_layers()
