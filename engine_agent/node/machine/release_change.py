"""Decides when a machine agent changes its release, from its order, the running release and the last attempt. The steps
are in `engine_agent.node.machine.releases`."""

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.machine import releases, service
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.releases import ReleaseTrouble
from engine_agent.protocol.machine_messages import Release, ReleaseOrder

log = logging.getLogger(__name__)

TRIED_FILE = "release-tried.json"
AGAIN_AFTER_S = 600.0
"""A failed download or a full disk is retried after this time without another order."""


class Tried(Struct, frozen=True):
    """The last ordered release, and why it does not run; "": it runs or is about to."""

    id: str
    attempt: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class _Installing:
    order: ReleaseOrder
    task: asyncio.Task[Path]
    cancelled: threading.Event


class ReleaseChange:
    """Of one host. `own`: the release of this process; None: a checkout, which never changes."""

    def __init__(self, paths: HostPaths, own: Release | None) -> None:
        self._paths, self._own = paths, own
        self._journal = Journal(paths.home / TRIED_FILE, Tried)
        self._retry_at_s = 0.0
        self._installing: _Installing | None = None
        self.tried = self._resume()

    @property
    def on_trial(self) -> bool:
        return self._paths.trial.exists()

    @property
    def is_installing(self) -> bool:
        """Whether `follow` has started an installation that is not finished."""
        return self._installing is not None

    def is_due(self, order: ReleaseOrder | None) -> bool:
        """Whether the order names another release than the running one, without a failed attempt."""
        if order is None or self._own is None or order.id == self._own.id or self.on_trial:
            return False
        known = self.tried
        if known is None or not known.trouble or (known.id, known.attempt) != (order.id, order.attempt):
            return True
        return 0 < self._retry_at_s <= time.monotonic()

    async def follow(self, order: ReleaseOrder | None, servers: tuple[str, ...], credential: str | None) -> bool:
        """Starts or continues the ordered installation, and switches to it if it is still ordered when complete. True:
        this process must exit now. False: it stays, and `tried` has the error of a failed attempt."""
        current = self._installing
        if current is None:
            if order is not None and credential and self.is_due(order):
                cancelled = threading.Event()
                work = asyncio.to_thread(releases.install, self._paths, order, servers, credential, cancelled)
                self._installing = _Installing(order, asyncio.create_task(work), cancelled)
            return False
        if current.order != order:
            current.cancelled.set()
        if not current.task.done():
            return False
        self._installing = None
        if current.cancelled.is_set():
            log.info(
                "release %s is not installed: %s",
                current.order.id,
                current.task.exception() or "it is no longer ordered",
            )
            return False
        return await self._switch(current.order, current.task)

    def give_up(self) -> None:
        if self._installing is not None:
            self._installing.cancelled.set()

    async def _switch(self, order: ReleaseOrder, installed: asyncio.Task[Path]) -> bool:
        try:
            folder = installed.result()
            self._store_attempt(Tried(order.id, order.attempt))
            await asyncio.to_thread(releases.switch_to, self._paths, folder, order.attempt)
        except (ReleaseTrouble, OSError) as error:
            log.error("the release does not change: %s", error)
            self._retry_at_s = time.monotonic() + AGAIN_AFTER_S
            self._store_attempt(Tried(order.id, order.attempt, str(error)))
            return False
        log.info("switched to release %s", order.id)
        return True

    def confirm(self) -> None:
        """Call when the control plane has accepted a connection of this release."""
        try:
            if releases.confirm(self._paths):
                log.info("the release is confirmed")
            service.write_start(self._paths)
            if not self.is_installing:
                for name in releases.trim(self._paths):
                    log.info("removed release %s", name)
        except OSError as error:
            log.error("cannot clean up after the change of the release: %s", error)

    def _resume(self) -> Tried | None:
        try:
            known = self._journal.load()
        except CorruptJournal as error:
            log.error("%s", error)
            known = None
        if self._own is None:
            return known
        if self.on_trial and known is not None and known.id != self._own.id:
            # killed before the switch: there is nothing to undo
            with contextlib.suppress(OSError):
                self._paths.trial.unlink(missing_ok=True)
                self._paths.trial_tries.unlink(missing_ok=True)
            return None
        if self._paths.went_back.exists() and known is not None and known.id != self._own.id and not known.trouble:
            limit_s, starts = service.TRIAL_LIMIT_S, service.TRIAL_STARTS
            why = f"release {known.id} did not connect within {limit_s} s and {starts} starts; the previous one stays"
            log.error("%s", why)
            return self._store_attempt(Tried(known.id, known.attempt, why))
        return known

    def _store_attempt(self, tried: Tried) -> Tried:
        self.tried = tried
        try:
            self._journal.save(tried)
        except OSError as error:
            log.error("cannot store which release was tried: %s", error)
        return tried
