"""When a machine agent changes its release: what its order names, what runs, and what was tried already. The steps are
`engine_agent.node.machine.releases`."""

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
"""What could not be fetched or has no room may be another time, if nobody gave another order until then."""


class Tried(Struct, frozen=True):
    """The release that was ordered last, and why it does not run; "": it does, or is about to."""

    id: str
    attempt: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class _Installing:
    order: ReleaseOrder
    task: asyncio.Task[Path]
    given_up: threading.Event


class ReleaseChange:
    """Of one host. `own`: what this process runs; None: a checkout, which nothing changes."""

    def __init__(self, paths: HostPaths, own: Release | None) -> None:
        self._paths, self._own = paths, own
        self._journal = Journal(paths.home / TRIED_FILE, Tried)
        self._again_s = 0.0
        self._installing: _Installing | None = None
        self.tried = self._resume()

    @property
    def on_trial(self) -> bool:
        return self._paths.trial.exists()

    @property
    def is_installing(self) -> bool:
        """Whether `follow` has begun something that it has not ended."""
        return self._installing is not None

    def is_due(self, order: ReleaseOrder | None) -> bool:
        """Whether the order names another release than runs, which was not tried in vain."""
        if order is None or self._own is None or order.id == self._own.id or self.on_trial:
            return False
        known = self.tried
        if known is None or not known.trouble or (known.id, known.attempt) != (order.id, order.attempt):
            return True
        return 0 < self._again_s <= time.monotonic()

    async def follow(self, order: ReleaseOrder | None, servers: tuple[str, ...], credential: str | None) -> bool:
        """Begin to install what is ordered, or go on with it, and switch to it if it still is when it is whole. True:
        this process must end now; False: it stays, and `tried` says what was in vain."""
        current = self._installing
        if current is None:
            if order is not None and credential and self.is_due(order):
                given_up = threading.Event()
                work = asyncio.to_thread(releases.install, self._paths, order, servers, credential, given_up)
                self._installing = _Installing(order, asyncio.create_task(work), given_up)
            return False
        if current.order != order:
            current.given_up.set()
        if not current.task.done():
            return False
        self._installing = None
        if current.given_up.is_set():
            log.info("release %s is left: %s", current.order.id, current.task.exception() or "nobody wants it any more")
            return False
        return await self._switch(current.order, current.task)

    def give_up(self) -> None:
        """What is being fetched is not waited for."""
        if self._installing is not None:
            self._installing.given_up.set()

    async def _switch(self, order: ReleaseOrder, installed: asyncio.Task[Path]) -> bool:
        try:
            folder = installed.result()
            self._note(Tried(order.id, order.attempt))
            await asyncio.to_thread(releases.switch_to, self._paths, folder, order.attempt)
        except (ReleaseTrouble, OSError) as error:
            log.error("the release stays: %s", error)
            self._again_s = time.monotonic() + AGAIN_AFTER_S
            self._note(Tried(order.id, order.attempt, str(error)))
            return False
        log.info("switched to release %s", order.id)
        return True

    def confirm(self) -> None:
        """The control plane has heard this release and spoken to it."""
        try:
            if releases.confirm(self._paths):
                log.info("the release is confirmed")
            service.write_start(self._paths)
            if not self.is_installing:
                for name in releases.trim(self._paths):
                    log.info("removed release %s", name)
        except OSError as error:
            log.error("cannot tidy up after the change of release: %s", error)

    def _resume(self) -> Tried | None:
        try:
            known = self._journal.load()
        except CorruptJournal as error:
            log.error("%s", error)
            known = None
        if self._own is None:
            return known
        if self.on_trial and known is not None and known.id != self._own.id:
            # Killed before the switch: there is nothing to go back from.
            with contextlib.suppress(OSError):
                self._paths.trial.unlink(missing_ok=True)
                self._paths.trial_tries.unlink(missing_ok=True)
            return None
        if self._paths.went_back.exists() and known is not None and known.id != self._own.id and not known.trouble:
            limit_s, starts = service.TRIAL_LIMIT_S, service.TRIAL_STARTS
            why = f"release {known.id} did not connect within {limit_s} s and {starts} starts; what was before goes on"
            log.error("%s", why)
            return self._note(Tried(known.id, known.attempt, why))
        return known

    def _note(self, tried: Tried) -> Tried:
        self.tried = tried
        try:
            self._journal.save(tried)
        except OSError as error:
            log.error("cannot write down which release was tried: %s", error)
        return tried
