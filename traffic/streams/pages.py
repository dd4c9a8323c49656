"""Streams of a deployment that may continue at other cells, for its page: what became of them in the last day."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.dashboard.charts import Chart, Colour, Series
from controlplane.dashboard.events import marked
from engine_agent.protocol.stream_counts import PoolStreams, sum_of
from fleet.load.planner import quantile_ms
from kernel.tones import Tone
from traffic.region_shares.selectors.traffic import traffic_policies
from traffic.streams.models import StreamHour
from traffic.streams.services import counts_of

SHOWN_H = 24
_CAUSES = {
    "leaving": "their cell drained",
    "stalled": "their cell was silent",
    "connection_lost": "their cell's proxy or host failed",
    "engine_died": "their engine died",
    "engine_error": "their engine failed",
    "engine_silent": "their engine was silent",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of the table: streams with one outcome for one reason. `percent`: of all relayed ones."""

    name: str
    reason: str
    tone: Tone
    count: int
    percent: float


@dataclass(frozen=True, slots=True)
class Streams:
    """`is_on`: the deployment's streams continue. Pauses in milliseconds, None without any."""

    deployment: str
    is_on: bool
    counts: PoolStreams
    outcomes: tuple[Outcome, ...]
    pause_p50_ms: float | None
    pause_p99_ms: float | None
    charts: tuple[Chart, ...]

    @property
    def continued(self) -> int:
        return sum(self.counts.continued_total.values())

    @property
    def cut(self) -> int:
        return sum(self.counts.cut_total.values())


def streams_of(deployment: str, now: datetime) -> Streams:
    """Two queries."""
    policy = traffic_policies().get(deployment)
    until = now.replace(minute=0, second=0, microsecond=0)
    since = until - timedelta(hours=SHOWN_H - 1)
    hours = [PoolStreams()] * SHOWN_H
    for at, stored in StreamHour.objects.filter(deployment=deployment, at__gte=since, at__lte=until).values_list(
        "at", "counts"
    ):
        place = int((at - since).total_seconds() // 3600)
        hours[place] = sum_of(hours[place], counts_of(stored))
    counts = PoolStreams()
    for each in hours:
        counts = sum_of(counts, each)
    return Streams(
        deployment=deployment,
        is_on=policy is not None and policy.continuation,
        counts=counts,
        outcomes=tuple(_outcomes(counts)),
        pause_p50_ms=quantile_ms(counts.pauses, 0.5),
        pause_p99_ms=quantile_ms(counts.pauses, 0.99),
        charts=marked(_charts(hours, since)) if counts != PoolStreams() else (),
    )


def _outcomes(counts: PoolStreams) -> Iterator[Outcome]:
    rows = (
        ("continued", counts.continued_total, Tone.OK),
        ("cut", counts.cut_total, Tone.BAD),
        ("cannot continue", counts.unable_total, Tone.IDLE),
    )
    for name, by_reason, tone in rows:
        for reason, count in sorted(by_reason.items(), key=lambda pair: (-pair[1], pair[0])):
            percent = 100 * count / counts.relayed_total if counts.relayed_total else 0.0
            yield Outcome(name, _CAUSES.get(reason, reason.replace("_", " ")), tone, count, percent)


def _charts(hours: list[PoolStreams], since: datetime) -> list[Chart]:
    lines = (
        Series("continued", [float(sum(each.continued_total.values())) for each in hours]),
        Series("cut", [float(sum(each.cut_total.values())) for each in hours], Colour.BAD),
    )
    pauses = (
        Series("median", [quantile_ms(each.pauses, 0.5) for each in hours]),
        Series("p99", [quantile_ms(each.pauses, 0.99) for each in hours]),
    )
    return [
        Chart("streams-moved", "Streams that left their cell", "per hour", since, 3600, lines, decimals=0),
        Chart("streams-pause", "Pause of a stream that continues", "ms", since, 3600, pauses),
    ]
