"""The first minutes on GPUs: the parts that are most likely to fail come first.

    python -m benchmarks.gpu_smoke                 # one GPU, ten minutes
    python -m benchmarks.gpu_smoke --devices 8 --minutes 60
    python -m benchmarks.gpu_smoke --dry-run       # on any machine: import and compose everything

Every part is a process of its own with a time limit, so that none hides the next. Each ends in one line: ``PASS``,
``FAIL``, ``TIMEOUT`` or ``SKIPPED``, its seconds, its name, and the last line of the error. Outputs and
``summary.json`` are in one folder, which is also packed into an archive to send. Models are made on the spot, with
random weights.

Run it in the environment of ``rllm-verl[gpu]`` with ``rllm-local``, ``rllm-workflows`` and pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "gpu"
END_SECONDS = 20.0  # for a part to release its devices
OUTPUT = "output.txt"


@dataclass(frozen=True)
class Part:
    """A part of the smoke test.

    Attributes:
        devices: GPUs that it needs.
        seconds: Time limit, if the time that is left allows it.
        tests: Arguments for pytest within ``tests/gpu``; none for the imports.
        reveals: What its failure would mean.
    """

    name: str
    devices: int
    seconds: int
    tests: tuple[str, ...]
    reveals: str

    def command(self, *, dry_run: bool) -> list[str]:
        """Returns the command of the part."""
        if not self.tests:
            return [sys.executable, "-m", "benchmarks.gpu_imports", *(["--dry-run"] if dry_run else [])]
        file, *selection = self.tests
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-s", "-x", str(TESTS / file)]
        return [*pytest, *selection, *(["--collect-only", "-q"] if dry_run else [])]


# verl starts for 170 s on an H200, where each process imports for 13 to 20 s. Parts start it up to three times.
PARTS = (
    Part("imports", 1, 60, (), "versions that do not fit each other or the driver"),
    Part(
        "sleep",
        1,
        600,
        ("test_weights.py", "-k", "sleep"),
        "sleeping servers: memory that stays, or wrong weights afterwards; with CUDA graphs last",
    ),
    Part("direct-send", 1, 360, ("test_weights.py", "-k", "sent_directly"), "weights above the bucket, meta tensors"),
    Part("adapters", 1, 360, ("test_weights.py", "-k", "adapters_alone"), "servers that wake with other adapters"),
    Part("whole-run", 1, 720, ("test_whole_runs.py", "-k", "every_term"), "loss terms, offload, resuming, export"),
    Part("precisions", 1, 720, ("test_trainers.py", "-k", "precisions"), "attention and autocast"),
    Part("memory", 1, 360, ("test_trainers.py", "-k", "dry_run"), "formulas of docs/memory.md"),
    Part("local", 1, 180, ("test_whole_runs.py", "-k", "local"), "backend local on CUDA"),
    Part("local-parts", 1, 180, ("test_local.py",), "its head, sampler, cache, stream and memory on CUDA"),
    Part("ranks", 8, 300, ("test_trainers.py", "-k", "many_devices and eight_ranks"), "FSDP2 over NCCL"),
    Part("sequences", 8, 300, ("test_trainers.py", "-k", "many_devices and sequence_parallel"), "Ulysses"),
    Part("tight-sync", 8, 600, ("test_separated.py", "-k", "first_sync"), "memory of the first separated sync"),
    Part("busy-sync", 8, 400, ("test_separated.py", "-k", "under_load"), "aborted completions, a dead server"),
    Part("nccl", 2, 300, ("test_weights.py", "-k", "nccl"), "separated weights, completions over a sync"),
    Part("merged", 2, 240, ("test_weights.py", "-k", "merged_adapters"), "adapters merged for separated servers"),
    Part(
        "experts", 8, 600, ("test_trainers.py", "-k", "mixture and experts"), "expert parallelism, the check of weights"
    ),
    Part("megatron", 8, 600, ("test_trainers.py", "-k", "mixture and megatron"), "strategy megatron"),
)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a part.

    Attributes:
        outcome: ``PASS``, ``FAIL``, ``TIMEOUT`` or ``SKIPPED``.
        detail: Last line of the error, or why it was skipped.
    """

    name: str
    outcome: str
    seconds: float
    detail: str = ""

    def line(self) -> str:
        """Returns the line to print."""
        return f"{self.outcome:8} {self.seconds:6.0f} s  {self.name}" + (f": {self.detail}" if self.detail else "")


def chosen(devices: int) -> list[Part]:
    """Returns the parts for a number of GPUs; with several, only those that need several, and the imports."""
    return [
        part for part in PARTS if not part.tests or (part.devices == 1 if devices == 1 else 1 < part.devices <= devices)
    ]


def last_error(output: str) -> str:
    """Returns the line of an output that says most about a failure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E  ", "FAIL ", "error:", "ERROR"))]
    return (errors or lines or ["no output"])[-1].removeprefix("E ").strip()[:300]


def run_part(part: Part, folder: Path, seconds: float, *, dry_run: bool) -> Verdict:
    """Runs a part in a process group of its own, which has ended when this returns."""
    if seconds < 1:
        return Verdict(part.name, "SKIPPED", 0.0, "no time left; use --minutes")
    folder.mkdir(parents=True)
    began = time.monotonic()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"}
    with (folder / OUTPUT).open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            part.command(dry_run=dry_run),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    took = time.monotonic() - began
    printed = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    if code is None:
        return Verdict(part.name, "TIMEOUT", took, f"not done after {seconds:.0f} s; last: {last_error(printed)}")
    if code == 0 and part.tests and not dry_run and " passed" not in printed:
        return Verdict(part.name, "SKIPPED", took, last_error(printed))
    return Verdict(part.name, "PASS" if code == 0 else "FAIL", took, "" if code == 0 else last_error(printed))


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a part: first politely, so that Ray and vLLM release their devices."""
    for number, wait in ((signal.SIGINT, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        if process.poll() is not None and number is signal.SIGINT:
            continue
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        process.wait(wait) if number is signal.SIGKILL else _patiently(process, wait)


def _patiently(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def smoke(
    parts: Sequence[Part], folder: Path, *, minutes: float, dry_run: bool, say: Callable[[str], None] = print
) -> list[Verdict]:
    """Runs the parts, prints a line for each, and writes ``summary.json`` after every one."""
    until = time.monotonic() + 60 * minutes
    verdicts: list[Verdict] = []
    for part in parts:
        seconds = min(part.seconds, until - time.monotonic())
        verdicts.append(run_part(part, folder / part.name, seconds, dry_run=dry_run))
        say(verdicts[-1].line())
        summary = {"dry_run": dry_run, "parts": [asdict(verdict) for verdict in verdicts]}
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return verdicts


def pack(folder: Path) -> Path:
    """Packs the folder into an archive next to it."""
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)
    return archive


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_smoke", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, choices=(1, 2, 8), default=1, help="GPUs to use. Defaults to 1.")
    parser.add_argument("--minutes", type=float, default=10.0, help="Time limit of all parts together.")
    parser.add_argument("--dry-run", action="store_true", help="Import and collect everything, without a GPU.")
    parser.add_argument("--output", type=Path, help="Folder for outputs; must not exist. Defaults to a new one.")
    options = parser.parse_args(arguments)
    if options.output is not None and options.output.exists():
        parser.error(f"--output {options.output} exists")
    default = Path(tempfile.gettempdir()) / f"gpu-smoke-{datetime.now():%Y%m%d-%H%M%S}"
    folder: Path = options.output or default
    folder.mkdir(parents=True)
    verdicts = smoke(chosen(options.devices), folder, minutes=options.minutes, dry_run=options.dry_run)
    failed = [verdict for verdict in verdicts if verdict.outcome in ("FAIL", "TIMEOUT")]
    print(f"{len(verdicts) - len(failed)} of {len(verdicts)} parts did not fail; send {pack(folder)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
