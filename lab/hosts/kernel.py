"""The calls of the kernel that Python 3.11 has no functions for: namespaces, mounts, and a cable's offloads. Each
raises OSError where the kernel refuses."""

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
PR_SET_PDEATHSIG = 1
"""From <linux/sched.h>, <linux/mount.h> and <linux/prctl.h>."""
SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO = 0x17, 0x1F, 0x24
"""From <linux/sockios.h> and <linux/ethtool.h>."""
NETWORKS = Path("/run/netns")
"""Where `ip netns` keeps the network namespaces that it made."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones; a new PID namespace is for the next child."""
    _call("unshare", flags)


def join(namespace: Path) -> None:
    """Enter a namespace by its file; a PID namespace is for the next child."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(descriptor)
    finally:
        os.close(descriptor)


def enter(descriptor: int) -> None:
    _call("setns", descriptor, 0)


@contextmanager
def inside_network(name: str) -> Iterator[None]:
    """In the network namespace of this name, this thread alone: sockets that are made here stay in it."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        join(NETWORKS / name)
        try:
            yield
        finally:
            enter(own)
    finally:
        os.close(own)


def map_user(inside: int, outside: int, inside_group: int, outside_group: int) -> None:
    """In a new user namespace: be the user `inside`, who is `outside` where the namespace was made."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {outside} 1")
    Path("/proc/self/gid_map").write_text(f"{inside_group} {outside_group} 1")


def mount(source: str, target: str | Path, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    texts = [None if text is None else str(text).encode() for text in (source, target, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def die_with_parent() -> None:
    _call("prctl", PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def pid_outside() -> int:
    return int(os.readlink("/proc/self"))


def without_offloads(interface: str) -> None:
    """Let the kernel finish each packet before this interface sends it: checksums, and no more than its MTU."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in (ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_STXCSUM):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request.ljust(40, b"\0"))


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
