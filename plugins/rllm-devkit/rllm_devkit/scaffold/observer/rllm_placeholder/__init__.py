"""Hooks of observer ``placeholder``. Listing plugins imports them; keep both modules light."""

from __future__ import annotations

from .observer import on_batch_end, on_episode_finished, on_train_end, on_train_start

RLLM_CORE_API = "1.0"

__all__ = ["on_batch_end", "on_episode_finished", "on_train_end", "on_train_start"]
