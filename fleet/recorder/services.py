"""Writes the flight recorder. Called after a pass has applied its decisions and released its lease; whatever goes wrong
here is logged, and the next pass begins a new recording."""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cache
from itertools import islice

import msgspec
from django.db import transaction
from django.db.models import Max, Sum

from engine_agent.protocol.machine_messages import version_text
from fleet.recorder.models import RecordedRound, RoundSubject
from fleet.recorder.planning.encoding import encode_round, schema_of
from fleet.recorder.planning.explanations import RECONCILER
from fleet.recorder.planning.loops import RecordedLoop, Round
from fleet.recorder.planning.reasons import Reason
from fleet.releases.services.archive import NoRelease, checkout_release

CHAIN_MOST = 60
"""Rounds after a whole snapshot. Decoding the last one of a fleet of 5,000 nodes takes 0.6 s, for a page 0.03 s
(docs/bench/passes.md)."""
CHAIN_FOR = timedelta(minutes=15)
REASONS_MOST = 100
"""Of one round. A region that falls silent moves thousands of nodes in one, all for the same reason."""
INPUTS_KEPT = timedelta(days=7)
ROUNDS_KEPT = timedelta(days=30)
"""As long as events."""
BYTES_MOST = 1024**3
"""Of all inputs; the oldest are deleted first."""
LONGEST_ROUND = 32 * 1024**2

log = logging.getLogger(__name__)


class Recorder:
    """One of each loop in a process that runs its passes. Keeps the last recorded snapshot, of which the next one is a
    difference."""

    def __init__(self, loop: RecordedLoop = RECONCILER) -> None:
        self.loop = loop
        self._forget()

    def _forget(self) -> None:
        self._base: RecordedRound | None = None
        self._length = 0
        self._view: object = None
        self._settings: object = None

    def record(self, rounds: Iterable[Round]) -> None:
        """Stores rounds, which may be made while they are read. Never raises: recording must not stop healing."""
        try:
            for one in rounds:
                self._record_one(one)
        except Exception:
            self._forget()
            log.exception("rounds of the %s were not recorded; the next one begins a new recording", self.loop.name)

    def _record_one(self, one: Round) -> None:
        base = self._base_for(one)
        inputs = encode_round(one, self._view if base else None)
        if len(inputs) > LONGEST_ROUND:
            self._forget()
            log.warning("a round of %d bytes was not recorded; the limit is %d", len(inputs), LONGEST_ROUND)
            return
        reasons = _reasons(self.loop, one)
        with transaction.atomic():
            row = RecordedRound.objects.create(
                loop=self.loop.name,
                base=base,
                at=one.now,
                planner=one.decided[-1].planner,
                decided=sum(sum(part.applied) for part in one.decided),
                reasons=[msgspec.to_builtins(reason) for reason in reasons],
                inputs=inputs,
                size=len(inputs),
                schema=schema_of(self.loop),
                release=_release(),
            )
            about = sorted({subject for reason in reasons for subject in reason.subjects})
            RoundSubject.objects.bulk_create(RoundSubject(round=row, subject=subject) for subject in about)
        if base is None:
            self._base, self._length = row, 0
        self._length += 1
        self._view, self._settings = one.view, one.settings

    def _base_for(self, one: Round) -> RecordedRound | None:
        base = self._base
        if base is None or self._settings != one.settings or self._length > CHAIN_MOST:
            return None
        return base if base.at <= one.now < base.at + CHAIN_FOR else None


@cache
def _release() -> str:
    """This control plane's version, with the digest of its source if it has one."""
    try:
        own = checkout_release()
    except NoRelease:
        return "unknown"
    return version_text(own.version, own.id)


def _reasons(loop: RecordedLoop, one: Round) -> list[Reason]:
    """Of applied decisions."""
    reason_of = loop.explain(one)
    told = (
        reason_of(decision, part.planner)
        for part in one.decided
        for decision, applied in zip(part.decisions, part.applied, strict=True)
        if applied and loop.is_told(decision)
    )
    return list(islice(told, REASONS_MOST))


def rounds_trim(*, now: datetime) -> int:
    """Deletes old rounds, and inputs that are too old or too many, a whole chain at a time. Returns the number of
    chains that lost their inputs."""
    old = RecordedRound.objects.filter(at__lt=now - ROUNDS_KEPT)
    if (last := old.aggregate(last=Max("id"))["last"]) is not None:
        with transaction.atomic():
            RoundSubject.objects.filter(round__lte=last).delete()
            RecordedRound.objects.filter(pk__lte=last, base__isnull=False).delete()
            RecordedRound.objects.filter(pk__lte=last, followers__isnull=True).delete()
    chains = (
        RecordedRound.objects.filter(base=None, inputs__isnull=False)
        .annotate(more=Sum("followers__size"), last=Max("followers__at"))
        .order_by("-id")
        .values_list("id", "at", "last", "size", "more")
    )
    total, dropped = 0, []
    for chain, at, last, size, more in chains:
        total += size + (more or 0)
        if total > BYTES_MOST or (last or at) < now - INPUTS_KEPT:
            dropped.append(chain)
    for chain in dropped:
        with transaction.atomic():
            RecordedRound.objects.filter(base=chain).update(inputs=None, size=0)
            RecordedRound.objects.filter(pk=chain).update(inputs=None, size=0)
    return len(dropped)
