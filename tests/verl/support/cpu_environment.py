"""The environment of a run with real verl and real vLLM on a machine without GPU.

Imports neither verl nor torch: verl reads these variables when it is imported, so they are set before.
"""

from __future__ import annotations

import os
from pathlib import Path


def environment_variables() -> dict[str, str]:
    """What the driver, the Ray workers and vLLM's processes must have; Ray and vLLM hand it on to their children.

    The modules of this folder are put before what ``PYTHONPATH`` and ``VERL_USE_EXTERNAL_MODULES`` already name.
    """
    folder = str(Path(__file__).parent)
    return {
        "PYTHONPATH": _joined(os.pathsep, folder, os.environ.get("PYTHONPATH", "")),
        "VERL_USE_EXTERNAL_MODULES": _joined(",", "cpu_platform", os.environ.get("VERL_USE_EXTERNAL_MODULES", "")),
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP engine for "cuda", and this is its switch to use it on another device.
        "VERL_ENGINE_DEVICE": "cuda",
        # vLLM compiles its sampler with inductor, for 45 s at the first request; nothing here is fast or slow by it.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # The loopback interface only, which the backend says itself where nothing has imported Ray before.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _joined(separator: str, first: str, others: str) -> str:
    return separator.join([first, *(name for name in others.split(separator) if name and name != first)])
