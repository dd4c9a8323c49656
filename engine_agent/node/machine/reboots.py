"""Reboots of a joined host by order of the control plane, if its operator allowed them: then a file contains the
command that reboots the host. An order is on disk before its command runs, and never runs again, wherever the process
is killed. A recorded order without a reboot has failed."""

import logging
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.machine.paths import HostPaths

log = logging.getLogger(__name__)

DEFAULT_COMMAND = "shutdown -r now"
COMMAND_VARIABLE = "SWITCHYARD_REBOOT_COMMAND"
COMMAND_BYTES = 4096
COMMAND_LIMIT_S = 60.0
REBOOT_LIMIT_S = 300.0
"""From the command to the end of this boot: systemd stops units for up to 90 s each."""


class RebootMark(msgspec.Struct, frozen=True):
    """The last order that was carried out, or was about to be. `boot`: of that time; `at_s`: seconds since that boot.
    `trouble`: why the command failed."""

    order: str
    boot: str
    at_s: float
    trouble: str = ""


def this_boot(proc: Path = Path("/proc")) -> str:
    """Differs after each boot: of the kernel, or of a container, which has its own first process. A host may hide that
    process from other accounts (`hidepid`), and then only the kernel counts. Empty if the kernel is hidden as well."""
    try:
        kernel = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    try:
        first = (proc / "1/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return kernel
    return f"{kernel} {first[19]}"  # the time when process 1 started


def seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def run_command(command: str) -> str:
    """Runs the command of an operator. Returns why it failed, or ""."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{command}` failed: {error}"
    if done.returncode:
        return f"`{command}` failed with status {done.returncode}: {done.stderr.strip()[-300:]}"
    return ""


class Reboots:
    """Carries out one order at a time. `result` may be called from another thread than `follow`."""

    def __init__(
        self,
        paths: HostPaths,
        *,
        boot: str | None = None,
        run: Callable[[str], str] = run_command,
        now_s: Callable[[], float] = seconds_since_boot,
    ) -> None:
        self._file, self._run, self._now_s = paths.reboot_command, run, now_s
        self._journal = Journal(paths.home / "reboot.json", RebootMark)
        self._boot = this_boot() if boot is None else boot
        self._refused: RebootMark | None = None
        self._problem = "" if self._boot else "the kernel does not show its boot ID, so it is not known what rebooted"
        self._mark: RebootMark | None = None
        try:
            self._mark = self._journal.load()
        except CorruptJournal as error:
            log.error("%s", error)
            self._problem = f"its record of reboots was damaged, so the order may have been carried out: {error}"

    @property
    def is_allowed(self) -> bool:
        return not self._command()[1]

    def follow(self, order: str) -> None:
        """Carries out an order that the control plane has sent now, unless it was begun or refused before."""
        if not order or order in (self._mark and self._mark.order, self._refused and self._refused.order):
            return
        mark = RebootMark(order, self._boot, self._now_s())
        command, why_not = self._command()
        if why_not or self._problem:
            self._refused = msgspec.structs.replace(mark, trouble=why_not or self._problem)
            log.warning("refused to reboot: %s", self._refused.trouble)
            return
        try:
            self._journal.save(mark)
        except OSError as error:
            self._refused = msgspec.structs.replace(mark, trouble=f"the order cannot be recorded: {error}")
            return
        self._mark, self._refused = mark, None
        log.warning("order %s: rebooting with `%s`", order, command)
        if trouble := self._run(command):
            self._mark = msgspec.structs.replace(mark, trouble=trouble)
            self._journal.save(self._mark)

    def result(self) -> tuple[str, str]:
        """The last order that has ended, and why the host did not reboot; "" if it did."""
        mark = self._refused or self._mark
        if mark is None:
            return "", ""
        if mark.boot != self._boot or mark.trouble:
            return mark.order, mark.trouble if mark.boot == self._boot else ""
        if self._now_s() - mark.at_s > REBOOT_LIMIT_S:
            return (
                mark.order,
                f"the host did not reboot within {REBOOT_LIMIT_S / 60:.0f} min; the order is not repeated",
            )
        return "", ""

    def _command(self) -> tuple[str, str]:
        """The command, or why the host may not be rebooted."""
        try:
            status = self._file.stat()
            text = self._file.read_bytes()[:COMMAND_BYTES].decode().strip()
        except FileNotFoundError:
            return "", f"its operator does not allow reboots: {self._file} does not exist"
        except (OSError, ValueError) as error:
            return "", f"{self._file} cannot be read: {error}"
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "", f"others may write {self._file}: make it writable only for the account of the machine agent"
        return (text, "") if text else ("", f"{self._file} is empty: write the command that reboots the host")
