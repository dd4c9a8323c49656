"""Becomes another program, after arranging that it ends with its parent and runs with no more rights than it needs.

Run as a script by the launcher, before any process that must not outlive it: the kernel sends the death signal the
moment the parent is gone, even by kill -9. It runs between fork and exec, so it imports the standard library only
and never returns: it either becomes the program or exits with 127 and one line on standard error."""

import argparse
import contextlib
import ctypes
import os
import pwd
import signal
import sys

# Linux UAPI: linux/prctl.h and linux/capability.h.
PR_SET_PDEATHSIG = 1
PR_SET_SECUREBITS = 28
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
SECBIT_NO_SETUID_FIXUP = 1 << 2
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION_3 = 0x20080522

CANNOT_EXEC = 127


class CapabilityHeader(ctypes.Structure):
    """`struct __user_cap_header_struct`."""

    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class CapabilitySets(ctypes.Structure):
    """`struct __user_cap_data_struct`: the low 32 capabilities come first, the high ones in a second one."""

    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> None:
    """Apply the options, then become the program after `--`. Raises OSError if the kernel refused a step. Raises
    KeyError if there is no such account."""
    parser = argparse.ArgumentParser(prog="guard")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--death-signal", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--account")
    parser.add_argument("--traverse", action="store_true")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(arguments)
    if options.nice:
        prioritise(options.nice)
    if options.account:
        become(options.account, traverse=options.traverse)
    # After the change of account, because that clears it.
    _call("prctl", PR_SET_PDEATHSIG, options.death_signal, 0, 0, 0)
    if os.getppid() != options.parent:
        raise OSError("the parent is gone already")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(options.program[0], options.program)  # noqa: S606 - becoming the program is the purpose


def prioritise(nice: int) -> None:
    """Take a place in the queue for the processor, as a process and, where the kernel shares by session, as a session.
    Only root can raise priority; for other accounts nothing changes."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
        group.write(str(nice))


def become(account: str, *, traverse: bool) -> None:
    """Drop root for `account`; with `traverse`, keep the one capability to pass folders closed to it, such as /root."""
    entry = pwd.getpwnam(account)
    if traverse:
        # Keeps the capabilities over the change of account, and lets access() count them: initdb asks by that.
        _call("prctl", PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    os.setgroups([])
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    os.umask(0o077)
    if traverse:
        _keep_one_of(CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE)


def _keep_one_of(*capabilities: int) -> None:
    header, sets = CapabilityHeader(CAPABILITY_VERSION_3, 0), (CapabilitySets * 2)()
    _call("capget", ctypes.byref(header), ctypes.byref(sets))
    held = next((each for each in capabilities if sets[0].permitted & (1 << each)), None)
    if held is None:
        raise OSError("this root may not pass closed folders (CAP_DAC_READ_SEARCH)")
    only = CapabilitySets(1 << held, 1 << held, 1 << held)
    _call("capset", ctypes.byref(header), ctypes.byref((CapabilitySets * 2)(only, CapabilitySets(0, 0, 0))))
    _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, held, 0, 0)


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, KeyError) as problem:
        sys.stderr.write(f"cannot start {sys.argv[-1]}: {problem}\n")
        sys.exit(CANNOT_EXEC)
