"""Environment variables for real verl and real vLLM on a machine without a GPU.

Imports neither verl nor torch, because verl reads these variables at import time.
"""

from __future__ import annotations

import os
from pathlib import Path


def environment_variables() -> dict[str, str]:
    """Variables for the driver, the Ray workers and vLLM's processes; Ray and vLLM pass them to their children.

    The modules of this folder come before existing entries of ``PYTHONPATH`` and ``VERL_USE_EXTERNAL_MODULES``.
    """
    folder = str(Path(__file__).parent)
    return {
        "PYTHONPATH": _joined(os.pathsep, folder, os.environ.get("PYTHONPATH", "")),
        "VERL_USE_EXTERNAL_MODULES": _joined(",", "cpu_platform", os.environ.get("VERL_USE_EXTERNAL_MODULES", "")),
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP engine for "cuda"; this is its option to use the engine on another device.
        "VERL_ENGINE_DEVICE": "cuda",
        # Without this, vLLM compiles its sampler with inductor, which takes 45 s and does not speed up these tests.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Permits `verl_runs.ONE_PROCESS`; an asynchronous engine has a process of its own in either case.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default, Ray's workers give way to everything else on the machine, such as another suite of tests.
        "RAY_worker_niceness": "0",
        # Loopback interface only. The backend sets this itself, unless Ray was imported before.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _joined(separator: str, first: str, others: str) -> str:
    return separator.join([first, *(name for name in others.split(separator) if name and name != first)])
