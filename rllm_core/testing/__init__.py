"""For plugin authors: a scripted engine and backend without torch, and checks of the contracts."""

from rllm_core.testing.scripted import ByteParser, ScriptedBackend, ScriptedEngine

__all__ = ["ByteParser", "ScriptedBackend", "ScriptedEngine"]
