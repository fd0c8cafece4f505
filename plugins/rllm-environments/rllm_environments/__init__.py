"""Trains on the environments of reasoning-gym, TextArena, gymnasium and OpenEnv, unedited."""

from __future__ import annotations

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"
