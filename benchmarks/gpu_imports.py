"""First part of `benchmarks.gpu_smoke`: imports what needs a GPU, calls a kernel of each, and prints versions."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "vllm", "verl", "ray", "transformers", "flash-attn", "cupy-cuda13x", "numpy", "tensordict",
    "rllm-core", "rllm-verl", "rllm-local",
)  # fmt: skip


def torch_computes() -> str:
    """Multiplies in bfloat16 on the GPU."""
    import torch

    ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    assert (ones @ ones)[0, 0].item() == 256
    device = torch.cuda.get_device_properties(0)
    return f"{device.name}, {device.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}"


def flash_attention() -> str:
    """Compares flash attention and its cross-entropy with torch's."""
    import torch
    from flash_attn import flash_attn_func
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    queries, keys, values = (torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mine = flash_attn_func(queries, keys, values, causal=True)
    parts = [part.transpose(1, 2) for part in (queries, keys, values)]
    other = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
    assert torch.allclose(mine.float(), other.float(), atol=2e-2)
    logits = torch.randn(8, 152064, device="cuda", dtype=torch.bfloat16)
    labels = torch.arange(8, device="cuda")
    losses = cross_entropy_loss(logits, labels)[0]
    expected = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    assert torch.allclose(losses, expected, atol=1e-2)
    return "attention and cross-entropy agree with torch's"


def cupy_has_nccl() -> str:
    """Imports NCCL through cupy, which verl uses for separated servers."""
    import cupy

    assert int(cupy.zeros(4).sum()) == 0
    from cupy.cuda import nccl

    return f"NCCL {nccl.get_version()}"


def vllm_imports() -> str:
    """Imports vLLM's compiled kernels, whose modules have other names from release to release."""
    import vllm
    import vllm.platforms.cuda

    return str(vllm.__version__)


def composed() -> str:
    """Composes verl's configuration for every case of the tests; needs verl, but no GPU."""
    try:
        version("verl")
    except PackageNotFoundError:
        return "nothing composed: verl is not installed"
    found = compose()
    return f"composed {len(found)} configurations: {', '.join(found)}"


def compose() -> dict[str, Any]:
    """Returns verl's configuration of every case in ``tests/gpu/cases.py``, and of the whole run.

    Raises:
        UserError: If a configuration is rejected, or does not fit on GPUs of 80 GB.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
    from cases import CASES, SMALL, WHOLE_RUN
    from rllm_verl.backend import VerlBackend

    from benchmarks.gpu_models import describe
    from rllm_core.assembly.parts import assemble
    from rllm_core.assembly.resolution import load_run_config
    from rllm_core.plugins import PluginManager

    plugins = PluginManager.from_environment()
    settings = {name: (case.shape, (*SMALL, *case.overrides)) for name, case in CASES.items()}
    settings["whole_run"] = "0.5b", WHOLE_RUN
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (shape, overrides) in settings.items():
            model = describe(Path(folder) / shape, shape)
            given = [f"model.path={model}", *overrides]
            config = load_run_config("sort", plugins, overrides=given, backend="verl", parser="chat_template")
            parts = assemble(config, plugins)
            assert isinstance(parts.backend, VerlBackend)
            parts.memory(80 * 10**9)
            found[name] = parts.backend._configuration
    return found


CHECKS: dict[str, Callable[[], str]] = {
    "torch": torch_computes,
    "flash_attn": flash_attention,
    "cupy": cupy_has_nccl,
    "vllm": vllm_imports,
}


def main() -> int:
    """Returns 0 if every check passed."""
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    if "--dry-run" in sys.argv[1:]:
        print("checks: " + ", ".join(CHECKS))
        print(composed())
        return 0
    driver = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    print(subprocess.run(driver, capture_output=True, text=True, check=False).stdout)
    failed = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok {name}: {check()}")
        except Exception as error:  # a report of every check, whatever the others do
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
