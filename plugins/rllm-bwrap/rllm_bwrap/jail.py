"""Starts bwrap, so that its process has nothing but an interpreter and an empty folder."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rllm_bwrap import inside
from rllm_bwrap.interpreters import Interpreter
from rllm_core.sandbox import Limits

# User id of isolated code in its user namespace and, if the run is root's, also outside of it.
NOBODY = 65534
SETUP_SECONDS = 30.0
INSIDE = "/inside.py"
DEVICES = ("null", "zero", "full", "random", "urandom")
# Memory limits only apply per process. If memory runs out, the kernel should kill isolated code, not the run.
FIRST_TO_END = ("/bin/sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$@"', "sh")
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup-try")


@dataclass(frozen=True, kw_only=True)
class Jail:
    """The way isolated processes are started.

    Attributes:
        bwrap: Path of bubblewrap.
        interpreter: Python interpreter that runs in the jail.
        variables: Environment variables of all processes in the jail.
        blocklist: Filter of system calls.
        processes: Maximum number of processes and threads of a program or call.
        disk_bytes: Maximum number of bytes in its folder, which is in memory.
    """

    bwrap: str
    interpreter: Interpreter
    variables: dict[str, str]
    blocklist: bytes
    processes: int
    disk_bytes: int

    def start(self, what: Sequence[str], limits: Limits, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Starts `rllm_bwrap.inside`.

        Args:
            what: Arguments of the script after the settings, ``["program"]`` or ``["function", PATH]``.
            limits: Limits of the program, or of each call.
            files: File descriptors to inherit; for a program, one to report its start, and one with its source.
        """
        is_root = maps_users()
        ready, info = os.pipe() if is_root else (-1, -1)
        mapped, go = os.pipe() if is_root else (-1, -1)
        passed = [*files, *((info, mapped) if is_root else ())]
        try:
            process = subprocess.Popen(
                [*self._command(what[0], files, info, mapped), self._settings(limits, what[0], files, is_root), *what],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if what[0] == "program" else subprocess.DEVNULL,
                env=self.variables,
                start_new_session=True,
                bufsize=0,
                pass_fds=passed,
                cwd="/",
            )
            if is_root:
                os.close(info)
                info = -1
                _map_users(ready, go)
        finally:
            for descriptor in (ready, info, mapped, go):
                if descriptor >= 0:
                    os.close(descriptor)
        return process

    def _command(self, kind: str, files: Sequence[int], info: int, mapped: int) -> list[str]:
        python = [self.interpreter.executable, *(["-I", "-S"] if kind == "program" else ["-P"])]
        command = [*FIRST_TO_END, self.bwrap, *(f"--unshare-{name}" for name in NAMESPACES), "--die-with-parent"]
        command += ["--hostname", "sandbox", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        if info >= 0:
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
                command += ["--cap-add", capability]
            command += ["--info-fd", str(info), "--userns-block-fd", str(mapped)]
        else:
            command += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
        command += [*self.interpreter.mounts(), "--dir", "/dev", "--tmpfs", inside.FOLDER]
        if not any(path.startswith("/tmp/") for path in self.interpreter.paths):
            command += ["--symlink", inside.FOLDER, "/tmp"]
        for device in DEVICES:
            command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        command += ["--ro-bind", inside.__file__, INSIDE]
        if kind == "program":
            command += ["--perms", "0444", "--file", str(files[1]), inside.PROGRAM]
        return [*command, "--remount-ro", "/", "--chdir", inside.FOLDER, "--", *python, INSIDE]

    def _settings(self, limits: Limits, kind: str, files: Sequence[int], is_root: bool) -> str:
        # If isolated code runs as the user that starts it, the surrounding processes count toward the limit, too.
        around = 0 if is_root else (1 if kind == "program" else 3)
        return json.dumps(
            {
                "blocklist": self.blocklist.hex(),
                "disk_bytes": self.disk_bytes,
                "memory_bytes": limits.memory_bytes,
                "output_bytes": limits.output_bytes,
                "processes": self.processes + around,
                "started": files[0] if files else -1,
                "user": NOBODY if is_root else None,
                "wall_seconds": limits.wall_seconds,
            }
        )


def maps_users() -> bool:
    """Whether this process is root and may use other user ids. Isolated code then gets one: no limit binds root."""
    if os.getuid() != 0:
        return False
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()]
    return any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in ranges)


def _map_users(ready: int, go: int) -> None:
    """Maps the users of bwrap's new user namespace, and lets bwrap continue."""
    said = b""
    while not said.endswith(b"}\n") and select.select([ready], [], [], SETUP_SECONDS)[0]:
        chunk = os.read(ready, 4096)
        if not chunk:
            break
        said += chunk
    with contextlib.suppress(ValueError, OSError):  # bwrap has failed, and explains why on its stderr
        child = json.loads(said)["child-pid"]
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n", encoding="utf-8")
    with contextlib.suppress(BrokenPipeError):
        os.write(go, b"1")
