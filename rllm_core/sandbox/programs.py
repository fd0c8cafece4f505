"""Runs programs in separate processes: collects their output, and how they ended."""

from __future__ import annotations

import signal
import subprocess
import time

import rllm_core.sandbox.processes as processes
from rllm_core.sandbox.results import CodeResult, Limits, Outcome


def result_of(process: subprocess.Popen[bytes], stdin: str, limits: Limits) -> CodeResult:
    """Sends a freshly started program its input, and waits until the program ends or exceeds a limit.

    For sandboxes that start a process for each program. The process must be the leader of its own session
    (``start_new_session=True``), with unbuffered pipes for stdin, stdout and stderr. At the end, the whole session is
    killed. Whoever starts the process must set its limits on memory and files.
    """
    started = time.monotonic()
    outcome: Outcome = "finished"
    try:
        with processes.Exchange(process, started + limits.wall_seconds) as exchange:
            exchange.send(stdin.encode("utf-8", "surrogatepass"), then_close=True)
            try:
                while exchange.step():
                    if len(exchange.output) + len(exchange.errors) > limits.output_bytes:
                        outcome = "output_limit"
                        break
                else:
                    process.wait(max(0.0, started + limits.wall_seconds - time.monotonic()))
            except (processes.Overrun, subprocess.TimeoutExpired):
                outcome = "timeout"
            exit_code = process.poll()
    finally:
        processes.end(process)
    if outcome == "finished" and exit_code is not None and exit_code < 0:
        # The CPU-time limit, a little above the wall-clock limit, can take effect first if this process is late.
        outcome = "timeout" if exit_code == -signal.SIGXCPU else "killed"
    return CodeResult(
        outcome=outcome,
        exit_code=exit_code if outcome == "finished" else None,
        stdout=exchange.output[: limits.output_bytes].decode("utf-8", "replace"),
        stderr=exchange.errors[: limits.output_bytes].decode("utf-8", "replace"),
        wall_seconds=time.monotonic() - started,
    )
