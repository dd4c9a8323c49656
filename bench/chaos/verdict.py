"""What a campaign accepts: which broken connections and late passes its faults excuse. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos.schedule import Fault, exemption
from bench.chaos.users import Outcome, Request

PASS_WITHIN_S = 15.0
"""Maximum age of the last pass."""
SEEN_WITHIN_S = 5.0
"""Until then a client has read that its connection ended."""


@dataclass(frozen=True, slots=True)
class Window:
    """From `begins` to `ends`, in seconds of the clock of requests, control loops may stand still."""

    begins: float
    ends: float
    why: str

    def overlaps(self, begins: float, ends: float) -> bool:
        return begins <= self.ends and ends >= self.begins


@dataclass(frozen=True, slots=True)
class FaultWindow:
    """A fault, and the URLs of the ingresses that it may have touched."""

    begins: float
    ends: float
    fault: Fault
    urls: frozenset[str]

    def excuses(self, request: Request) -> bool:
        """Only a stream that passed one of its ingresses, whose connection broke during it, and whose client continued
        with a repeat."""
        return (
            request.outcome is Outcome.REPEATED
            and exemption(self.fault) is not None
            and any(attempt.url in self.urls for attempt in request.attempts)
            and any(
                attempt.is_repeat and self.begins <= attempt.began <= self.ends + SEEN_WITHIN_S
                for attempt in request.attempts
            )
        )


def unexcused(requests: Iterable[Request], windows: Sequence[FaultWindow]) -> list[Request]:
    """Requests that failed, were cut or differ, and repeats that no exemption covers."""
    return [
        request
        for request in requests
        if request.outcome is not Outcome.COMPLETE and not any(window.excuses(request) for window in windows)
    ]


@dataclass(frozen=True, slots=True)
class PassSeen:
    """At `at`, in seconds of the clock of requests, the last pass was `age_s` old."""

    at: float
    age_s: float


def late_passes(seen: Iterable[PassSeen], windows: Sequence[Window]) -> list[PassSeen]:
    """Returns the samples with a last pass that was too old although no fault excuses it."""
    late = (look for look in seen if look.age_s > PASS_WITHIN_S)
    return [look for look in late if not any(window.overlaps(look.at - look.age_s, look.at) for window in windows)]


def has_trail(kinds: Sequence[str], subjects: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an event or incident of one of these kinds names one of the subjects: a node, cell, region or ingress."""
    wanted = set(subjects)
    return any(row["kind"] in kinds and wanted & _named(row) for row in rows)


def _named(row: Mapping[str, Any]) -> set[str]:
    return {str(row.get(field, "")) for field in ("node", "cell", "region", "subject")}
