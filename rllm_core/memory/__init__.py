"""Memory of a run by arithmetic: the estimate that a backend reports, and formulas that several backends share."""

from rllm_core.memory.estimate import Device, MemoryEstimate, MemoryUse, parse_bytes

__all__ = ["Device", "MemoryEstimate", "MemoryUse", "parse_bytes"]
