"""First part of `benchmarks.gpu_smoke`: imports what needs a GPU, calls a kernel of each, and prints versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "torch", "triton", "vllm", "verl", "ray", "transformers", "flash-attn", "cupy-cuda13x", "numpy", "tensordict",
    "rllm-core", "rllm-verl", "rllm-local",
)  # fmt: skip


def torch_computes() -> str:
    """Multiplies in bfloat16 on the GPU."""
    import torch

    product = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16) @ torch.ones(
        256, 256, device="cuda", dtype=torch.bfloat16
    )
    assert product[0, 0].item() == 256
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
    assert torch.allclose(
        losses, torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none"), atol=1e-2
    )
    return "attention and cross-entropy agree with torch's"


def cupy_has_nccl() -> str:
    """Imports NCCL through cupy, which verl uses for separated servers."""
    import cupy

    assert int(cupy.zeros(4).sum()) == 0
    from cupy.cuda import nccl

    return f"NCCL {nccl.get_version()}"


def vllm_imports() -> str:
    """Imports vLLM's compiled kernels."""
    import vllm
    import vllm._C

    return str(vllm.__version__)


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
