"""Removes releases of the agent that nothing needs any more: their rows, what lies of them on this host, and their
archives in the cache. At the start of each controller, for that is when releases become more."""

import logging
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
from django.db import DatabaseError, IntegrityError, transaction

from fleet.models import AgentRelease, AgentRollout
from fleet.planning.agent_releases import Removal, RolloutReleases, plan_removal
from fleet.providers.local.processes import code_of
from fleet.selectors.agents import releases_named
from fleet.services.agent_archive import (
    LEFT_AFTER_S,
    NoRelease,
    archive_files,
    checkout_release,
    release_folder,
    unfinished_archives_delete,
)
from fleet.services.agent_releases import release_register

ARCHIVE_KEPT_S = 30 * 24 * 3600.0
"""Homes that share a cache know nothing of each other: an archive goes once no controller has kept it for so long."""

log = logging.getLogger(__name__)


def releases_refresh(*, now: datetime) -> None:
    """Record the release of this control plane and remove those that nothing needs. Errors are logged: the fleet runs
    on without it."""
    try:
        release_register(now=now)
    except (DatabaseError, OSError, NoRelease) as error:
        log.error("the release of the agent that this control plane carries cannot be kept: %s", error)
        return
    try:
        unfinished_archives_delete(now.timestamp())
        releases_trim(now=now)
    except (DatabaseError, OSError) as error:
        log.error("releases of the agent that nothing needs cannot be removed: %s", error)


def releases_trim(*, now: datetime) -> tuple[str, ...]:
    """Remove what is not kept, here and in the database; which releases the fleet no longer knows. What begins to be
    needed at the same moment stays, and what something still runs from stays on disk until a later start.

    Raises:
        OSError: the cache cannot be made.
    """
    removal = _removal(now)
    AgentRollout.objects.filter(id__in=removal.rollouts).delete()
    gone = tuple(name for name in removal.releases if _forget(name))
    kept = removal.kept | (set(removal.releases) - set(gone))
    _remove_folders(kept, now.timestamp())
    _remove_archives(kept, now.timestamp())
    if gone:
        log.info("releases of the agent that nothing needs are removed: %s", ", ".join(gone))
    return gone


def _removal(now: datetime) -> Removal:
    rows = list(AgentRelease.objects.order_by("-created_at", "-id"))
    rollouts = [
        RolloutReleases(rollout.pk, rollout.source_id, rollout.target_id, rollout.is_active)
        for rollout in AgentRollout.objects.all()
    ]
    current = {row.id for row in rows if row.is_current}
    return plan_removal([row.id for row in rows], {checkout_release().id, *current, *releases_named(now)}, rollouts)


def _forget(release: str) -> bool:
    """A rollout that begins meanwhile names it: then it stays."""
    try:
        with transaction.atomic():
            return AgentRelease.objects.filter(id=release, is_current=False).delete()[0] > 0
    except IntegrityError:
        return False


def _remove_folders(kept: Collection[str], now_s: float) -> None:
    """Of releases, and of attempts to keep one. What is younger than an hour may not be known yet."""
    there = release_folder("").glob("*")
    old = [path for path in there if path.name not in kept and _is_old(path, now_s, LEFT_AFTER_S)]
    running = set(_code_that_runs()) if old else set()
    for path in old:
        if str(path) not in running:
            shutil.rmtree(path, ignore_errors=True)


def _code_that_runs() -> Iterator[str]:
    """Engines and cell proxies keep the code that they began with, while their agents go on to other releases."""
    for process in psutil.process_iter():
        yield from code_of(process).split(os.pathsep)


def _remove_archives(kept: Collection[str], now_s: float) -> None:
    for path, release in archive_files():
        with suppress(OSError):  # another controller removes it, too
            if release in kept:
                os.utime(path, (now_s, now_s))
            elif _is_old(path, now_s, ARCHIVE_KEPT_S):
                path.unlink()


def _is_old(path: Path, now_s: float, after_s: float) -> bool:
    try:
        return now_s - path.stat().st_mtime > after_s
    except OSError:
        return False
