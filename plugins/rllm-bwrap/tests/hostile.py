"""Programs that try to get out. Each leaves what it found in ``found``, which must be what is expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Attempts are bounded, so that a sandbox that fails a test does no harm to the machine that runs it.
START = """
import ctypes, errno, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def refused(attempt):
    try:
        return f"got {attempt()!r:.200}"
    except Exception as error:
        return type(error).__name__

def error_of(returned):
    return errno.errorcode.get(ctypes.get_errno()) if returned == -1 else f"got {returned}"
"""


@dataclass(frozen=True)
class Attempt:
    """A hostile program.

    Attributes:
        source: Its source, after `START`, with names of the test in braces, such as ``{secret}``.
        expected: What it must have found.
    """

    source: str
    expected: Any


def _is_any_error(found: Any) -> bool:
    return bool(found) and not any(str(one).startswith("got") for one in found)


class AllRefused:
    """Equals a list of errors."""

    def __eq__(self, found: object) -> bool:
        return isinstance(found, list) and _is_any_error(found)

    def __repr__(self) -> str:
        return "only errors"


class AtMost:
    """Equals numbers up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __eq__(self, found: object) -> bool:
        return isinstance(found, int) and 0 < found <= self.limit

    def __repr__(self) -> str:
        return f"1 to {self.limit}"


CORPUS = {
    "network": Attempt(
        "found = [refused(lambda: socket.create_connection((host, port), timeout=2)) for host, port in "
        "(('127.0.0.1', {port}), ('localhost', {port}), ('1.1.1.1', 53), ('169.254.169.254', 80))]",
        AllRefused(),
    ),
    "sockets of other kinds": Attempt(
        "found = [refused(lambda: socket.socket(domain, kind)) for domain, kind in "
        "((40, 1), (16, 3), (17, 3), (38, 5), (socket.AF_INET, socket.SOCK_RAW))]",  # vsock, netlink, packet, alg, raw
        AllRefused(),
    ),
    "abstract sockets": Attempt(
        "found = [refused(lambda: socket.socket(socket.AF_UNIX).connect('\\0{abstract}'))]", AllRefused()
    ),
    "home and files": Attempt(
        "found = [refused(lambda: os.listdir(path)) for path in ({folder!r}, '/home', os.path.dirname({folder!r}))]"
        "+ [refused(lambda: open(path).read()) for path in ({secret!r}, '/etc/passwd', '/etc/shadow', '/etc/hosts')]",
        AllRefused(),
    ),
    "the root folder": Attempt(
        "found = sorted(set(os.listdir('/')) - {roots})",
        [],
    ),
    "proc and sys": Attempt(
        "found = [refused(lambda: os.listdir(path)) for path in ('/proc', '/sys', '/run', '/var')]"
        "+ [refused(lambda: open(f'/proc/{{pid}}/environ').read()) for pid in (1, {pid}, 'self')]",
        AllRefused(),
    ),
    "other processes": Attempt(
        "found = [refused(lambda: os.kill(pid, signal.SIGKILL)) for pid in range(2, 40) if pid != os.getpid()]"
        "+ [refused(lambda: os.kill({pid}, signal.SIGKILL))]",
        AllRefused(),
    ),
    "its process group": Attempt(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(0, signal.SIGTERM)\n"
        "found = os.getpgid(0) == os.getpid() == os.getsid(0)",
        True,
    ),
    "its parent": Attempt(
        # Nothing happens: the first process of a namespace is immune.
        "for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):\n    refused(lambda: os.getppid() and "
        "os.kill(os.getppid(), number))\nfound = os.getppid() in (0, 1)",
        True,
    ),
    "ptrace": Attempt(
        "found = [error_of(libc.ptrace(request, pid, 0, 0)) for request in (0, 16, 0x4206)"
        " for pid in (0, 1, 2, {pid})]",
        AllRefused(),
    ),
    "memory of other processes": Attempt(
        "found = [error_of(libc.process_vm_readv(pid, None, 0, None, 0, 0)) for pid in (1, 2, {pid})]", AllRefused()
    ),
    "fork bomb": Attempt(
        "found = 0\n"
        "try:\n"
        "    while found < 500:\n"
        "        if not os.fork():\n"
        "            time.sleep(60)\n"
        "            os._exit(0)\n"
        "        found += 1\n"
        "except OSError:\n"
        "    pass",
        AtMost(32),
    ),
    "fork bomb of sessions": Attempt(
        "reader, writer = os.pipe()\n"
        "def grow(depth):\n"
        "    os.write(writer, b'x')\n"
        "    for _ in range(3):\n"
        "        try:\n"
        "            if not os.fork():\n"
        "                os.setsid()\n"
        "                if depth < 4:\n"
        "                    grow(depth + 1)\n"
        "                time.sleep(60)\n"
        "                os._exit(0)\n"
        "        except OSError:\n"
        "            pass\n"
        "grow(0)\n"
        "time.sleep(1)\n"
        "found = len(os.read(reader, 1000))",
        AtMost(32),
    ),
    "threads": Attempt(
        "found = 0\n"
        "try:\n"
        "    while found < 500:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "        found += 1\n"
        "except RuntimeError:\n"
        "    pass",
        AtMost(32),
    ),
    "namespaces": Attempt(
        "found = [error_of(libc.unshare(flag)) for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000)]"
        "+ [error_of(libc.syscall({clone}, flag | signal.SIGCHLD, 0, 0, 0, 0)) for flag in (0x10000000, 0x20000000)]"
        "+ [error_of(libc.syscall(435, 0, 0)), error_of(libc.setns(0, 0))]",
        AllRefused(),
    ),
    "memory": Attempt(
        "found = [refused(lambda: len(bytearray(8 << 30))), refused(lambda: mmap.mmap(-1, 8 << 30)),"
        " refused(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))]",
        AllRefused(),
    ),
    "memory that nobody counts": Attempt(
        "found = [error_of(libc.shmget(0, 1 << 20, 0o1600)), refused(lambda: os.memfd_create('x')),"
        " error_of(libc.msgget(0, 0o1600)), error_of(libc.mq_open(b'/x', 0o102, 0o600, None))]",
        AllRefused(),
    ),
    "disk": Attempt(
        "found = 0\n"
        "try:\n"
        "    for number in range(300):\n"
        "        with open(str(number), 'wb') as file:\n"
        "            found += file.write(bytes(1 << 20))\n"
        "except OSError:\n"
        "    pass",
        AtMost(64 << 20),
    ),
    "a large file": Attempt(
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "found = [refused(lambda: os.truncate(os.open('x', 0o102), 1 << 30))]",
        AllRefused(),
    ),
    "many files": Attempt(
        "found = 0\n"
        "try:\n"
        "    for number in range(20_000):\n"
        "        os.mkdir(str(number))\n"
        "        found += 1\n"
        "except OSError:\n"
        "    pass",
        AtMost(4096),
    ),
    "open files": Attempt(
        "found = 0\n"
        "try:\n"
        "    for number in range(2000):\n"
        "        os.dup(0)\n"
        "        found += 1\n"
        "except OSError:\n"
        "    pass",
        AtMost(256),
    ),
    "files of its parents": Attempt(
        "found = []\n"
        "for number in range(256):\n"
        "    try:\n"
        "        os.fstat(number)\n"
        "        found.append(number)\n"
        "    except OSError:\n"
        "        pass\n"
        "found = len(found) - 3",  # the fourth is where a call writes its result
        {"program": 0, "function": 1},
    ),
    "writing outside": Attempt(
        "found = [refused(lambda: open(path + '/x', 'w')) for path in "
        "('/', '/usr', '/usr/bin', '/etc', '/dev', sys.prefix, os.path.dirname(os.__file__), {folder!r})]"
        "+ [refused(lambda: open(path, 'a')) for path in ('/main.py', '/inside.py', sys.executable, os.__file__)]"
        "+ [refused(lambda: os.mkdir('/x')), refused(lambda: os.chmod(os.__file__, 0o777))]",
        AllRefused(),
    ),
    "symbolic links": Attempt(
        "os.symlink({secret!r}, 'a')\nos.symlink('/../../../..' + {folder!r}, 'b')\nos.symlink('/proc/1/root', 'c')\n"
        "found = [refused(lambda: open('a').read()), refused(lambda: os.listdir('b')),"
        "refused(lambda: os.listdir('c')),"
        "refused(lambda: open('a', 'w')), refused(lambda: os.link(os.__file__, 'd')),"
        "refused(lambda: os.listdir('/tmp/../../..' + {folder!r}))]",
        AllRefused(),
    ),
    "variables": Attempt("found = sorted(name for name, value in os.environ.items() if 'planted' in name + value)", []),
    "devices": Attempt("found = sorted(os.listdir('/dev'))", ["full", "null", "random", "urandom", "zero"]),
    "making devices": Attempt(
        "found = [refused(lambda: os.mknod('x', 0o60660, os.makedev(8, 0))),"
        " refused(lambda: os.mknod('y', 0o20660, os.makedev(1, 1)))]",
        AllRefused(),
    ),
    "mounting": Attempt(
        "found = [error_of(libc.mount(b'x', b'/tmp', kind, 0, None)) for kind in (b'proc', b'tmpfs', b'sysfs')]"
        "+ [error_of(libc.umount2(b'/tmp', 2)), error_of(libc.mount(None, b'/usr', None, 32 | 4096, None)),"
        " refused(lambda: os.chroot('/tmp')), error_of(libc.syscall(430, b'tmpfs', 0))]",
        AllRefused(),
    ),
    "becoming root": Attempt(
        "found = [refused(lambda: os.setuid(0)), refused(lambda: os.setgid(0)), refused(lambda: os.setgroups([0]))]"
        "+ [refused(lambda: subprocess.run([path, '-c', 'id'], stdin=subprocess.DEVNULL, capture_output=True,"
        " check=True)) for path in ('/usr/bin/su', '/usr/bin/sudo')]"
        "+ ['ok' if os.getresuid() == (65534,) * 3 else 'got root']",
        AllRefused(),
    ),
    "rights": Attempt(
        "import struct\n"
        "sets = ctypes.create_string_buffer(24)\n"
        "libc.capget(struct.pack('=Ii', 0x20080522, 0), sets)\n"
        "found = [set(sets.raw) == {{0}}, libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0)]",
        [True, 1, 2],  # no new privileges, and a filter of system calls
    ),
    "the kernel": Attempt(
        "found = [error_of(libc.syscall(number, 0, 0, 0, 0, 0)) for number in (425, 435, {bpf}, {keyctl})]"
        "+ [refused(lambda: socket.sethostname('x'))]",
        AllRefused(),
    ),
}
