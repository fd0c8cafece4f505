"""The part that runs inside bwrap, trusted until it enters a jail. A script that imports nothing from other packages.

inside.py SETTINGS program                 becomes the program in /main.py
inside.py SETTINGS function PATH           serves calls of a function, one line of JSON each

A program has all of bwrap's namespaces for itself. Each call of a function runs in a process forked from one that has
imported the function, in its own folder and namespaces, and reports through a pipe. It can neither see nor change the
serving process, so all its effects end with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
from types import SimpleNamespace
from typing import Any

FOLDER = "/sandbox"
PROGRAM = "/main.py"

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITIES_V3 = 0x20080522

INODES = 4096
OPEN_FILES = 256
MESSAGE_CHARACTERS = 500
MAX_FRAMES = 50
DEPTH = 500
CHUNK_BYTES = 1 << 16
POLL_SECONDS = 0.002
FRAME = (str, int, str, str)

libc = ctypes.CDLL(None, use_errno=True)


class Filter(ctypes.Structure):
    """A filter of system calls, in the kernel's format."""

    _fields_ = (("steps", ctypes.c_ushort), ("program", ctypes.c_char_p))


def enter(settings: SimpleNamespace) -> None:
    """Puts this process, and every process it starts, into the jail. There is no way back."""
    options = f"size={settings.disk_bytes},nr_inodes={INODES},mode=1777"
    _must(libc.mount(b"tmpfs", FOLDER.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()))
    os.chdir(FOLDER)
    os.setsid()  # signals to its process group reach no process outside
    if settings.user is not None:
        os.setgroups([])
        os.setresgid(settings.user, settings.user, settings.user)
        os.setresuid(settings.user, settings.user, settings.user)
    none = ctypes.create_string_buffer(24)
    _must(libc.capset(struct.pack("=Ii", CAPABILITIES_V3, 0), none))
    _must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    steps = bytes.fromhex(settings.blocklist)
    _must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Filter(len(steps) // 8, steps)), 0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + settings.wall_seconds) + 1
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, OPEN_FILES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, settings.processes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, settings.output_bytes),
        (resource.RLIMIT_AS, settings.memory_bytes),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def become_program(settings: SimpleNamespace) -> None:
    """Replaces this process with the program."""
    os.set_inheritable(settings.started, False)
    enter(settings)
    os.write(settings.started, b"1")
    # -I: ignore variables and user packages.
    os.execv(sys.executable, [sys.executable, "-I", PROGRAM])


def serve(path: str, settings: SimpleNamespace) -> None:
    """Imports the function, reports that it is ready, and serves calls until stdin closes."""
    _must(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.close(nothing)
    module, _, attributes = path.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            function = getattr(function, attribute)
    except BaseException as error:
        _write(answers, _line({"error": _described(error), "frames": _frames(error)}))
        return
    gc.freeze()  # keeps the imported modules shared with the calls' processes
    _write(answers, _line({"ready": True}))
    for line in requests:
        # Only a process's children enter the PID namespace that it creates, and it can create one only once. So each
        # call needs a process that creates the namespaces, and another inside them.
        keeper = os.fork()
        if not keeper:
            try:
                answer = _answer_to(line, function, settings, (requests.fileno(), answers))
            except BaseException as error:
                answer = {"died": f"bwrap could not isolate it: {_described(error)}"}
            _write(answers, _line(answer))
            os._exit(0)
        os.waitpid(keeper, 0)


def _answer_to(line: bytes, function: Any, settings: SimpleNamespace, private: tuple[int, ...]) -> dict[str, Any]:
    _must(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID))
    _must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    reader, writer = os.pipe()
    deadline = time.monotonic() + settings.wall_seconds
    child = os.fork()
    if not child:
        try:
            for descriptor in (reader, *private):
                os.close(descriptor)
            _write(writer, _called(line, function, settings))
        finally:
            os._exit(0)
    os.close(writer)
    most = settings.output_bytes + CHUNK_BYTES  # error messages are longer than a result may be
    answer = _read(reader, most, deadline)
    is_whole = answer is not None and (answer.endswith(b"\n") or len(answer) > most)
    code = None if is_whole else _end_of(child, deadline)
    if code is None:
        os.kill(child, signal.SIGKILL)  # the first process of its namespace, so the others end with it
        os.waitpid(child, 0)
    if answer is None or (code is None and not is_whole):
        return {"timeout": True}
    if len(answer) > most:
        return {"too_long": len(answer)}
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code or 0}"
    return _checked(answer, settings.output_bytes, how)


def _read(reader: int, most: int, deadline: float) -> bytes | None:
    """Reads a line, or the part of it there is, or the start of one that is too long; None if it takes too long."""
    answer = b""
    while len(answer) <= most and not answer.endswith(b"\n"):
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        chunk = os.read(reader, CHUNK_BYTES)
        if not chunk:
            break
        answer += chunk
    return answer


def _end_of(child: int, deadline: float) -> int | None:
    """Waits for a child that sends nothing more, and returns its exit code; None if it does not end."""
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    return None


def _called(line: bytes, function: Any, settings: SimpleNamespace) -> bytes:
    try:
        arguments = json.loads(line)
        enter(settings)
        return _line({"result": function(*arguments)})
    except MemoryError:
        return b'{"memory": true}\n'
    except BaseException as error:  # including SystemExit
        return _line({"error": _described(error), "frames": _frames(error)})


def _checked(answer: bytes, output_bytes: int, how: str) -> dict[str, Any]:
    """Returns an answer from inside the jail, after checking that it has the required form."""
    sys.setrecursionlimit(DEPTH)  # JSON nested deeper than allowed fails here, and not in the run's process
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or len(said.keys() & {"result", "memory", "error"}) != 1:
        return {"died": how}
    if "result" in said:
        return {"too_long": len(answer)} if len(answer) > output_bytes else {"result": said["result"]}
    if "memory" in said:
        return {"memory": True}
    frames = said.get("frames")
    if not isinstance(frames, list) or not all(
        isinstance(frame, list) and tuple(map(type, frame)) == FRAME for frame in frames[:MAX_FRAMES]
    ):
        frames = []
    return {"error": str(said["error"])[:MESSAGE_CHARACTERS], "frames": frames[:MAX_FRAMES]}


def _must(returned: int) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _described(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MESSAGE_CHARACTERS]


def _frames(error: BaseException) -> list[tuple[str, int, str, str]]:
    """Returns the file, line, function and module of each traceback frame, innermost first."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name, str(trace.tb_frame.f_globals.get("__name__"))))
        trace = trace.tb_next
    return frames[: -MAX_FRAMES - 1 : -1]


def main(settings: str, kind: str, path: str = "") -> None:
    """Runs this side; see the module's docstring."""
    chosen = SimpleNamespace(**json.loads(settings))
    for first, end in ((3, chosen.started), (max(3, chosen.started + 1), OPEN_FILES)):
        os.closerange(first, end)  # descriptors left over from bwrap
    if kind == "program":
        become_program(chosen)
    serve(path, chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
