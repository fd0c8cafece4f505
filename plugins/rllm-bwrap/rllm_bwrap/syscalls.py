"""System calls that isolated code must not use, as a filter for the kernel (seccomp).

Namespaces take files, processes and the network away. This filter blocks what they do not cover: memory that no limit
counts (System V and anonymous shared memory); sockets that reach beyond a network namespace, such as from a virtual
machine to its host; and the calls through which most kernel vulnerabilities were reached, such as new namespaces and
mounts.
"""

from __future__ import annotations

import errno
import platform
import struct

# From linux/audit.h, with the numbers of these calls on each architecture.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
FORBIDDEN = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
FIRST_OF_X32 = 0x40000000
NEW_NAMESPACES = 0x7E020000
SOCKET_DOMAINS = (1, 2, 10)  # Unix, IPv4, IPv6

# From linux/bpf_common.h and linux/seccomp.h.
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, MACHINE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
KILL, FAIL, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def blocklist(machine: str | None = None) -> bytes:
    """Returns the filter's program for the kernel of this machine, or of another kind.

    Raises:
        ValueError: If this machine's system call numbers are unknown.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"this machine is {machine}, and only {' and '.join(MACHINES)} are supported")
    audit, column = MACHINES[machine]
    forbidden = FAIL | errno.EPERM
    steps = [(LOAD, 0, 0, MACHINE_AT), (JUMP_IF_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    if machine == "x86_64":  # the same calls under other numbers
        steps += [(JUMP_IF_AT_LEAST, 0, 1, FIRST_OF_X32), (RETURN, 0, 0, forbidden)]
    for numbers in FORBIDDEN.values():
        steps += [(JUMP_IF_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, forbidden)]
    # The flags of clone3 are in memory, which no filter can read; after this error, libraries fall back to clone.
    steps += [(JUMP_IF_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    steps += [
        (JUMP_IF_EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (JUMP_IF_ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, forbidden),
        (RETURN, 0, 0, ALLOW),
    ]
    steps += [(JUMP_IF_EQUAL, 0, 2 + len(SOCKET_DOMAINS), SOCKET[column]), (LOAD, 0, 0, FIRST_ARGUMENT_AT)]
    steps += [
        (JUMP_IF_EQUAL, len(SOCKET_DOMAINS) - position, 0, domain) for position, domain in enumerate(SOCKET_DOMAINS)
    ]
    steps += [(RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
