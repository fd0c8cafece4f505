"""The child's side of `ChildFunction` and `ChildSandbox`. Runs as a script and imports nothing from rllm-core.

in_child.py function PATH MEMORY_BYTES OUTPUT_BYTES SECONDS    serves calls of a function, one line of JSON each
in_child.py program SOURCE_FILE MEMORY_BYTES OUTPUT_BYTES SECONDS    becomes the program
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
MESSAGE_CHARACTERS = 500
MAX_FRAMES = 50


def die_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(memory_bytes: int, output_bytes: int) -> None:
    """Sets limits that this process and its children cannot raise."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def limit_cpu(more_seconds: float) -> None:
    """Limits CPU time, so that a spinning process ends even if its parent is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + more_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def serve(path: str, output_bytes: int, seconds: float) -> None:
    """Imports the function, reports that it is ready, and serves calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep the function's prints out of the answers
    module, _, attributes = path.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            function = getattr(function, attribute)
    except BaseException as error:
        answers.write(_line({"error": _described(error), "frames": _frames(error)}))
        return
    answers.write(_line({"ready": True}))
    for line in sys.stdin.buffer:
        limit_cpu(seconds)
        try:
            result = function(*json.loads(line))
            answer = _line({"result": result, **_spent()})
            if len(answer) > output_bytes:
                answer = _line({"too_long": len(answer)})
        except MemoryError:
            answer = _line({"memory": True, "unfit": True})  # the interpreter's state is unknown
        except BaseException as error:  # also SystemExit: report it to the caller and continue
            answer = _line({"error": _described(error), "frames": _frames(error), **_spent()})
        while answer:
            answer = answer[answers.write(answer) :]


def _spent() -> dict[str, Any]:
    """Returns the costs that the call reported with `rllm_core.costs.spend`, if that module is imported."""
    costs = sys.modules.get("rllm_core.costs")
    spent = {} if costs is None else costs.taken()
    return {"costs": spent} if spent else {}


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MESSAGE_CHARACTERS]


def _frames(error: BaseException) -> list[tuple[str, int, str, str]]:
    """Returns file, line, function and module of each traceback frame, innermost first."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name, str(trace.tb_frame.f_globals.get("__name__"))))
        trace = trace.tb_next
    return frames[: -MAX_FRAMES - 1 : -1]


def main(kind: str, target: str, memory_bytes: str, output_bytes: str, seconds: str) -> None:
    """Serves calls or becomes the program; see the module's docstring."""
    die_with_parent()
    limit(int(memory_bytes), int(output_bytes))
    if kind == "program":
        limit_cpu(float(seconds))
        # -I: ignore variables and user packages. exec: nothing of this interpreter's state reaches the program.
        os.execv(sys.executable, [sys.executable, "-I", target])
    serve(target, int(output_bytes), float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
