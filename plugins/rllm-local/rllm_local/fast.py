"""Finds the kernels of the extra ``rllm-local[fast]``."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

LANES = 16


@cache
def is_installed() -> bool:
    """Returns whether the extra is installed."""
    return importlib.util.find_spec("numba") is not None


@cache
def loaded() -> Any:
    """Returns `rllm_local.kernels`, which are compiled on first use on a machine."""
    return importlib.import_module("rllm_local.kernels")


def fits(numbers: torch.Tensor) -> bool:
    """Returns whether the kernels can compute attention for such a tensor, ``(..., head_dim)``, in this thread.

    They run on one core, so with more threads torch's own products are faster.
    """
    return (
        is_installed()
        and numbers.device.type == "cpu"
        and numbers.dtype == torch.float32
        and numbers.shape[-1] % LANES == 0
        and torch.get_num_threads() == 1
    )


def flat(numbers: torch.Tensor) -> npt.NDArray[np.float32]:
    """Returns a contiguous tensor as a flat array that shares its memory."""
    array: npt.NDArray[np.float32] = numbers.detach().view(-1).numpy()
    return array
