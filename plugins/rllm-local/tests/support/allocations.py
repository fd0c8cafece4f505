"""Measures what torch allocates on the CPU, by kind of tensor."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """Tracks the storages that operations create while this mode is active.

    Args:
        kind_of: Kind of a new tensor.

    Attributes:
        peak_bytes: Largest number of bytes of each kind that existed at once.
        restarted_bytes: Bytes of each kind when `restart` was called.
    """

    def __init__(self, kind_of: Callable[[torch.Tensor], str]) -> None:
        super().__init__()
        self._kind_of = kind_of
        self._now: Counter[str] = Counter()
        self._known: dict[int, tuple[str, int]] = {}
        self.peak_bytes: Counter[str] = Counter()
        self.restarted_bytes: Counter[str] = Counter()

    def ignore(self, tensors: Any) -> None:
        """Leaves out storages that exist already, of which operations create views."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = ("", 0)

    def restart(self) -> None:
        """Starts to look for a new peak."""
        self.peak_bytes, self.restarted_bytes = self._now.copy(), self._now.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return found

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or not storage.nbytes():
            return
        kind, size = self._known[storage._cdata] = self._kind_of(tensor), storage.nbytes()
        self._now[kind] += size
        self.peak_bytes[kind] = max(self.peak_bytes[kind], self._now[kind])
        weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, address: int) -> None:
        kind, size = self._known.pop(address)
        self._now[kind] -= size


def logits_or_other(vocabulary: int, hidden: int) -> Callable[[torch.Tensor], str]:
    """Returns a function for `Allocations` that recognizes logits by their width."""

    def kind_of(tensor: torch.Tensor) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # a DTensor, whose storage is not its own
            return "other"
        is_wide = tensor.dim() > 0 and tensor.shape[-1] == vocabulary
        is_gradient_of_head = tuple(tensor.shape) == (hidden, vocabulary)
        return "logits" if is_wide and not is_gradient_of_head else "other"

    return kind_of
