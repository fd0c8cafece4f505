"""Programs in processes of their own: what they print, and how they end."""

from __future__ import annotations

import signal
import subprocess
import time

import rllm_core.sandbox.processes as processes
from rllm_core.sandbox.results import CodeResult, Limits, Outcome


def result_of(process: subprocess.Popen[bytes], stdin: str, limits: Limits) -> CodeResult:
    """Gives a program that was just started its input, and waits for its end or that of its limits.

    For sandboxes that start a process for each program. It must be the leader of its own session
    (``start_new_session=True``), with unbuffered pipes for stdin, stdout and stderr. At the end, the whole session is
    killed. The limits on memory and files are up to who starts it.
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
        # The limit on CPU time, which is a little above that on the wall clock, comes first if this process is late.
        outcome = "timeout" if exit_code == -signal.SIGXCPU else "killed"
    return CodeResult(
        outcome=outcome,
        exit_code=exit_code if outcome == "finished" else None,
        stdout=exchange.output[: limits.output_bytes].decode("utf-8", "replace"),
        stderr=exchange.errors[: limits.output_bytes].decode("utf-8", "replace"),
        wall_seconds=time.monotonic() - started,
    )
