"""Boots a host: `python -m lab.hosts.host`, with a `Specification` as JSON on standard input. It becomes the host's
PID 1 in the host's own namespaces, starts the host's boot programs, and reaps orphans.

It prints the host's pid in this process's namespace and in the real one, or why the host does not boot."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.hosts import file_tree, kernel
from lab.hosts.file_tree import LABORATORY, START_AT_BOOT, FileTree

LIBRARY, CLOCK = "libfaketime.so.1", "clock"
CRONTAB, CRON_TABLE = "crontab", "/var/spool/cron/table"
SHUTDOWN = "shutdown"
ENDS = signal.SIGUSR2
"""What the command `shutdown` sends to PID 1."""
REBOOTS, REBOOTED = signal.SIGUSR1, 3
"""What `shutdown -r` sends, and the exit status of PID 1 after it."""
AT_BOOT = "@reboot "
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
BOOT_LOG = "/var/log/boot.log"


@dataclass(frozen=True, slots=True)
class Specification:
    """`uid`, `gid`: whom the host's processes run as; root is not made another."""

    name: str
    tree: FileTree
    etc: Mapping[str, str]
    environment: Mapping[str, str]
    uid: int
    gid: int


def host_environment(home: str, user: str, python: Path, *, has_clock: bool) -> dict[str, str]:
    """Returns the environment of a process on a host, above all its own clock.

    Only the time of day differs. Intervals use the kernel's monotonic clock, as on a host whose clock is changed. The
    library reads the file at most once a second. Its own arithmetic for waits is disabled: with it waits end early, and
    a process with several threads takes ten times the CPU time."""
    clock = {
        "LD_PRELOAD": f"{LABORATORY}/{LIBRARY}",
        "FAKETIME_TIMESTAMP_FILE": f"{LABORATORY}/{CLOCK}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        "FAKETIME_CACHE_DURATION": "0",
    }
    path = dict.fromkeys((LABORATORY, str(python.parent), *PATH))
    return {
        "PATH": ":".join(path),
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "LANG": "C.UTF-8",
        **(clock if has_clock else {}),
    }


def boot(specification: Specification) -> int:
    """Fork PID 1 of the host into its namespaces; returns its pid here. Raises OSError if the kernel refused."""
    kernel.join(kernel.NETWORKS / specification.name)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWPID)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reading)
        _become_init(specification, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe_end:
        answer: dict[str, Any] = json.loads(pipe_end.readline() or '{"error": "it exited immediately"}')
    print(json.dumps({"pid": pid, **answer}), flush=True)
    return pid


def _become_init(specification: Specification, answer: int) -> None:
    try:
        outside = kernel.pid_outside()
        socket.sethostname(specification.name)
        file_tree.mount(specification.tree)
        if specification.uid:
            kernel.unshare(kernel.CLONE_NEWUSER)
            kernel.map_user(specification.uid, 0, specification.gid, 0)
        os.chdir("/")
        Path(specification.environment["HOME"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        os.write(answer, json.dumps({"error": error.strerror}).encode() + b"\n")
        os._exit(1)
    os.write(answer, json.dumps({"outside": outside}).encode() + b"\n")
    os.close(answer)
    _init(dict(specification.environment))


def _init(environment: dict[str, str]) -> None:
    log = os.open(BOOT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(ENDS, lambda _number, _frame: os._exit(0))
    signal.signal(REBOOTS, lambda _number, _frame: os._exit(REBOOTED))
    for command in start_at_boot(Path(START_AT_BOOT), Path(CRON_TABLE)):
        with contextlib.suppress(OSError):
            subprocess.Popen(
                command, env=environment, cwd=environment["HOME"], stdin=nothing, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
    # From here on it is waited for, and not before: what starts at boot must not inherit a blocked signal.
    awaited = {signal.SIGCHLD, ENDS, REBOOTS}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while True:
        _reap()
        if (received := signal.sigwait(awaited)) != signal.SIGCHLD:
            os._exit(0 if received == ENDS else REBOOTED)


def start_at_boot(folder: Path, cron_table: Path) -> list[list[str]]:
    """The commands that a host starts when it boots: executables in a folder, and lines of cron for that."""
    programs = [[str(path)] for path in sorted(folder.glob("*.start")) if os.access(path, os.X_OK)]
    table = cron_table.read_text().splitlines() if cron_table.exists() else []
    return programs + [["/bin/sh", "-c", line[len(AT_BOOT) :]] for line in table if line.startswith(AT_BOOT)]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> int:
    """Boot the host and exit; its PID 1 keeps running."""
    given = json.loads(sys.stdin.readline())
    tree = given.pop("tree")
    tree |= {name: Path(tree[name]) for name in ("folder", "given")}
    specification = Specification(tree=FileTree(**tree), **given)
    try:
        file_tree.make(specification.tree, dict(specification.etc))
        boot(specification)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
