"""Runs the real command line in forked children, one JSON request per line on stdin.

A process of its own that has imported torch once, so that a command costs a fork and not a start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import preloaded  # noqa: F401 - what every command imports

from rllm_core import cli

POLL_SECONDS = 0.02


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            command(request)
        print(json.dumps(finished(child, request)), flush=True)


def finished(child: int, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the child's exit code, negative after a signal, or None if it was killed after ``limit_seconds``."""
    began, is_told = time.monotonic(), False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - began
        if ended:
            return {"code": os.waitstatus_to_exitcode(status), "seconds": seconds}
        if request["stops"] and not is_told and Path(request["mark"]).exists():
            os.kill(child, signal.SIGTERM)
            is_told = True
        if seconds > request["limit_seconds"]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"code": None, "seconds": seconds}
        time.sleep(POLL_SECONDS)


def command(request: dict[str, Any]) -> NoReturn:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(request["folder"])
    os.environ.update(request["environ"], RUDE_MARK=request["mark"])
    sys.argv = ["rllm-core", *request["arguments"]]
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - the requests are not the command's
    code: Any = 1
    try:
        cli.main()
    except SystemExit as leaving:
        code = leaving.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # waits for other threads, as an interpreter does at its end
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
