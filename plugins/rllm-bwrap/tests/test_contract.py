"""Runs the contract checks of sandboxes."""

from __future__ import annotations

from rllm_devkit.contracts import SandboxContract


class TestBwrap(SandboxContract):
    name = "bwrap"
