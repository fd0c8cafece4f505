"""Derives a run's memory and the size of its micro-batches from its device and model, before anything is allocated."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rllm_core.config import RunConfig
from rllm_core.memory import MemoryEstimate
from rllm_core.memory.transformer import TransformerShape
from rllm_core.model_files import CONFIG_FILE, read_model_file
from rllm_local import fast, memory
from rllm_local.config import LocalConfig
from rllm_local.model import device_of

logger = logging.getLogger(__name__)


def device_bytes(local: LocalConfig) -> tuple[int, int]:
    """Returns the memory of the run's device, and the free part of it.

    On the CPU, all memory counts as free: the free part varies, but runs on a CPU must be reproducible.
    """
    device = device_of(local)
    if device.type == "cuda":
        free, capacity = torch.cuda.mem_get_info(device)
        return capacity, free
    capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return capacity, capacity


def kernels_of(local: LocalConfig) -> str | None:
    """Returns a line for a dry run that says who computes sampling; None on devices without kernels."""
    if device_of(local).type != "cpu" or local.resolved(on_gpu=False).dtype != "float32":
        return None
    if fast.is_installed():
        return "sampling on one thread: the kernels of rllm-local[fast]"
    return "sampling on one thread: torch; the extra rllm-local[fast] is not installed"


def estimated_memory(config: RunConfig, local: LocalConfig, given_bytes: int | None) -> MemoryEstimate | str:
    """Returns a run's memory, or a line that explains why it is unknown. Also says who computes sampling.

    Args:
        config: Run file.
        local: Section ``[local]`` of the run file.
        given_bytes: Memory of the device; None to ask this machine's device.
    """
    found, line = _estimated(config, local, given_bytes), kernels_of(local)
    if line is None:
        return found
    return f"{found}; {line}" if isinstance(found, str) else replace(found, chosen=(*found.chosen, line))


def _estimated(config: RunConfig, local: LocalConfig, given_bytes: int | None) -> MemoryEstimate | str:
    path = config.model.path
    if not path:
        return "memory: the starter model needs a few MB"
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        return f"memory: model.path = {path!r} is not downloaded yet, and its shape is unknown"
    described = read_model_file(file)
    model_type = described.get("model_type", "")
    shape = TransformerShape.of(described)
    if shape is None:
        return f"memory: there are no formulas for models of type {model_type!r}"
    on_gpu = device_of(local).type == "cuda"
    capacity, free = device_bytes(local) if given_bytes is None else (given_bytes, given_bytes)
    return memory.estimate(config, local, shape, model_type, on_gpu=on_gpu, capacity=capacity, free=free)


def batch_tokens(config: RunConfig, local: LocalConfig, described: dict[str, Any], capacity: int, free: int) -> int:
    """Returns the positions per forward-backward pass; warns if limited memory makes them few.

    Args:
        config: Run file.
        local: Section ``[local]`` of the run file.
        described: Configuration of the model, as in ``config.json``.
        capacity: Memory of the device.
        free: Free part of it before the model was loaded.
    """
    on_gpu = device_of(local).type == "cuda"
    most, shape = memory.most_batch_tokens(local, on_gpu=on_gpu), TransformerShape.of(described)
    if shape is None:
        return most
    found = memory.fitting_batch_tokens(
        config, local, shape, described["model_type"], on_gpu=on_gpu, capacity=capacity, free=free
    )
    if found < most:
        logger.warning(memory.lowered(found))
    return found
