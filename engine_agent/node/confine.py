"""Runs a command under another account, without rights of root: `python -I -S confine.py --uid U --gid G --keep HOME
[--keep FOLDER …] [--show FOLDER …] -- command`. Run by file, as root. Without an account the command stays root, which
is only for HAProxy's master.

The command has no groups and no capabilities, and cannot gain any (`PR_SET_NO_NEW_PRIVS`). The account may not be able
to reach its own interpreter, for example in root's home. It then gets a mount namespace that contains only the folders
that it needs of the closed folder. Exit status 77: changing the account or the mounts failed."""

import argparse
import ctypes
import os
import stat
import sys

EXIT_NOT_CONFINED = 77
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
"""From <linux/prctl.h>, <linux/sched.h> and <linux/mount.h>."""
LIBC = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Becomes the command; returns only if that fails."""
    parser = argparse.ArgumentParser(prog="confine", allow_abbrev=False)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--gid", type=int)
    parser.add_argument("--show", action="append", default=[], metavar="FOLDER", help="readable folder")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="FOLDER", help="writable folder; the first is the home"
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    try:
        if options.uid is not None:
            show(options.show, options.keep, options.uid, options.gid)
            os.chdir(options.keep[0])
            become(options.uid, options.gid)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.execv(options.command[0], options.command)  # noqa: S606 - its purpose
    except OSError as error:
        sys.stderr.write(f"cannot run {options.command[0]} as uid {options.uid}: {error}\n")
    return EXIT_NOT_CONFINED


def become(uid: int, gid: int) -> None:
    """Changes to this account permanently. Raises OSError if the kernel refused."""
    os.umask(0o077)
    _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def show(readable: list[str], writable: list[str], uid: int, gid: int) -> None:
    """Makes these folders reachable for the account, if a folder above one of them is closed to it. Raises OSError if a
    folder is missing, or this process may not mount."""
    closed: dict[str, list[str]] = {}
    for path in sorted({*readable, *writable}):
        if above := closed_above(path, uid, gid):
            closed.setdefault(above, []).append(path)
    if not closed:
        return
    _call("unshare", CLONE_NEWNS)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    held = {path: os.open(path, os.O_PATH) for paths in closed.values() for path in paths}
    os.umask(0o022)  # of the folders in between
    for above, paths in closed.items():
        _mount("tmpfs", above, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
        for path in paths:
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{held[path]}", path, None, MS_BIND | MS_REC)
            if path not in writable:
                _mount("none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    for descriptor in held.values():
        os.close(descriptor)


def closed_above(path: str, uid: int, gid: int) -> str:
    """The uppermost folder above `path` that the account may not pass; empty if there is none."""
    above = os.path.dirname(path)
    names = above.split("/")
    for length in range(1, len(names) + 1):
        folder = "/".join(names[:length]) or "/"
        if not _may_pass(os.stat(folder), uid, gid):
            return folder
    return ""


def _may_pass(status: os.stat_result, uid: int, gid: int) -> bool:
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == gid else stat.S_IXOTH))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])


def _call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
