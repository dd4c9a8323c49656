"""Stores load over time of cells, deployments and regions, from the totals that cells report and the failed requests
that ingresses report, and the use of machines and devices. One worker at a time takes samples, four times a minute. A
missed sample goes into the next window; nothing is interpolated. Each failed request counts once, however often and
late it is reported."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db import connection, transaction
from django.db.models import F, Q
from psycopg import sql

from engine_agent.protocol.ingress_messages import STREAM_CUT
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.states import ServingClass
from fleet.deployments.models import Deployment
from fleet.deployments.planner import parse_objective
from fleet.load.models import LoadSubject, LoadWindow, NodeWindow, RefusedRequests
from fleet.load.planner import (
    FRESH_FOR_S,
    KEPT_S,
    MAX_COUNT,
    MINUTE_S,
    NODE_GAUGES,
    NODE_KEPT_S,
    NODE_TOTALS,
    Accumulator,
    CellCounters,
    FinishedWindow,
    Sample,
    advance,
    counters_of,
    fine_index,
    pooled_samples,
    refused_sample,
    sample_of,
    seen_by_clients,
)
from fleet.load.selectors import FLEET, cell_subject, deployment_subject, node_subject, region_subject
from fleet.nodes.models import HOLDS_SINCE
from kernel import live
from kernel.leases import lease_during

LEASE = "fleet:history"
SAMPLE_LIMIT_S = 30.0
_REPORTED = f"""
    SELECT cell.id, cell.deployment_id, cell.region_id, cell.generation,
      (report.load - 'classes' - 'usage')::text
    FROM fleet_cell cell
    JOIN fleet_cellmember member ON member.cell_id = cell.id AND member.rank = 0
    JOIN fleet_nodereport report ON report.node_id = member.node_id
    WHERE cell.state IN ('ready', 'draining') AND report.load IS NOT NULL AND {HOLDS_SINCE}
      AND report.cell = cell.id AND report.generation = cell.generation
"""  # noqa: S608 - only a condition
_SAVE_ACCUMULATORS = """
    UPDATE fleet_loadsubject SET memory = new.memory, index = %(index)s, seen_at = %(now)s
    FROM unnest(%(ids)s::bigint[], %(memories)s::bytea[]) AS new(id, memory) WHERE fleet_loadsubject.id = new.id
"""
COLUMNS = ("subject_id", *(field.name for field in fields(FinishedWindow)))
_COPY = sql.SQL("COPY fleet_loadwindow ({}) FROM STDIN").format(sql.SQL(", ").join(map(sql.Identifier, COLUMNS)))

_load_decoder = msgspec.json.Decoder(Load)
_accumulator_decoder = msgspec.msgpack.Decoder(Accumulator)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """The latest report of a serving cell's leader."""

    cell: str
    deployment: str
    region: str
    generation: int
    load: Load


def load_sample(*, now: datetime) -> int:
    """Takes a sample, unless there is one in this window of 15 s. Returns the number of finished windows."""
    if _is_sampled(now):
        return 0
    with lease_during(name=LEASE, ttl_s=SAMPLE_LIMIT_S, now=now) as is_ours:
        if not is_ours or _is_sampled(now):
            return 0
        with transaction.atomic():
            return _sample(now)


def _is_sampled(now: datetime) -> bool:
    return LoadSubject.objects.filter(name=FLEET, index__gte=fine_index(now.timestamp())).exists()


def history_trim(*, now: datetime) -> None:
    """Deletes windows older than their step's retention, and subjects without windows."""
    for step, kept_s in KEPT_S.items():
        LoadWindow.objects.filter(step_s=step, at__lt=now - timedelta(seconds=kept_s)).delete()
    for step, kept_s in NODE_KEPT_S.items():
        NodeWindow.objects.filter(step_s=step, at__lt=now - timedelta(seconds=kept_s)).delete()
    LoadSubject.objects.filter(seen_at__lt=now - timedelta(seconds=max(KEPT_S.values()))).delete()


def _sample(now: datetime) -> int:
    reported = list(_reported_loads(now))
    counted = LoadSubject.objects.exclude(name__startswith=node_subject(""))
    subjects = {name: (pk, encoded) for pk, name, encoded in counted.values_list("pk", "name", "memory")}
    counted_before = FLEET in subjects
    accumulators = {name: _accumulator_decoder.decode(encoded) for name, (_, encoded) in subjects.items() if encoded}
    samples = _samples(reported, accumulators, counted_before, _refused())
    ids = {name: pk for name, (pk, _) in subjects.items()} | _subjects_create(samples.keys() - subjects.keys(), now)
    done: list[tuple[int, FinishedWindow]] = []
    changed: dict[int, Accumulator] = {}
    for name in samples.keys() | {name for name, accumulator in accumulators.items() if accumulator.open}:
        accumulator = accumulators.setdefault(name, Accumulator())
        finished = advance(accumulator, samples.get(name), now.timestamp())
        if finished:
            changed[ids[name]] = accumulator
        done += [(ids[name], window) for window in finished]
    _accumulators_save(changed, now)
    _store(done)
    if done:
        live.push("history")
    return len(done)


def _reported_loads(now: datetime) -> Iterable[ReportedLoad]:
    with connection.cursor() as cursor:
        cursor.execute(_REPORTED, {"since": now - timedelta(seconds=FRESH_FOR_S)})
        for cell, deployment, region, generation, load in cursor.fetchall():
            yield ReportedLoad(cell, deployment, region, generation, _load_decoder.decode(load))


def _refused() -> list[tuple[str, str, Sample]]:
    """Deployment, region and requests that no cell counts as failed since the last sample. They then count as
    sampled."""
    fresh = RefusedRequests.objects.select_for_update().filter(Q(total__gt=F("sampled")) | Q(cut__gt=F("cut_sampled")))
    new = (F("total") - F("sampled"), F("cut") - F("cut_sampled"))
    rows = list(fresh.values_list("pk", "deployment", "region", *new))
    if rows:
        sampled = RefusedRequests.objects.filter(pk__in=[row[0] for row in rows])
        sampled.update(sampled=F("total"), cut_sampled=F("cut"))
    return [(deployment, region, refused_sample(*counts)) for _, deployment, region, *counts in rows]


def _samples(
    reported: list[ReportedLoad],
    accumulators: dict[str, Accumulator],
    counted_before: bool,
    refused: list[tuple[str, str, Sample]],
) -> dict[str, Sample]:
    """Subject -> its increase. Updates the counters in `accumulators` of cells."""
    objectives = _ttft_objectives()
    of_cells: dict[str, Sample] = {}
    by_place: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for cell in reported:
        name = cell_subject(cell.cell)
        accumulator = accumulators.setdefault(name, Accumulator())
        before = accumulator.counters
        if before is None and counted_before:  # a new row: everything that it has counted is new
            before = CellCounters(cell.generation)
        sample = sample_of(cell.load, cell.generation, before, objectives.get(cell.deployment))
        accumulator.counters = counters_of(cell.load, cell.generation)
        of_cells[name] = sample
        by_place[cell.deployment, cell.region].append(seen_by_clients(sample))
    for deployment, region, failures in refused:
        by_place[deployment, region].append(failures)
    return of_cells | _sums(by_place)


def _sums(by_place: Mapping[tuple[str, str], list[Sample]]) -> dict[str, Sample]:
    """Sums for deployments in regions, deployments, regions, and the fleet, which is always present."""
    parts: dict[str, list[Sample]] = defaultdict(list)
    parts[FLEET] = []
    for (deployment, region), samples in by_place.items():
        here = pooled_samples(samples)
        own = (deployment_subject(deployment, region), deployment_subject(deployment)) if deployment else ()
        for name in (*own, region_subject(region), FLEET):
            parts[name].append(here)
    return {name: pooled_samples(samples) for name, samples in parts.items()}


def _ttft_objectives() -> dict[str, float]:
    stated = Deployment.objects.values_list("name", "slo", "serving_class")
    return {name: parse_objective(slo, ServingClass(serving_class)).ttft_ms for name, slo, serving_class in stated}


def _subjects_create(names: Iterable[str], now: datetime) -> dict[str, int]:
    rows = LoadSubject.objects.bulk_create([LoadSubject(name=name, seen_at=now) for name in sorted(names)])
    return {row.name: row.pk for row in rows}


def _accumulators_save(accumulators: Mapping[int, Accumulator], now: datetime) -> None:
    values: dict[str, Any] = {
        "ids": list(accumulators),
        "memories": [_encoder.encode(accumulator) for accumulator in accumulators.values()],
        "index": fine_index(now.timestamp()),
        "now": now,
    }
    with connection.cursor() as cursor:
        cursor.execute(_SAVE_ACCUMULATORS, values)


def _store(done: list[tuple[int, FinishedWindow]]) -> None:
    names = COLUMNS[1:]
    with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
        for subject, window in done:
            copy.write_row((subject, *(getattr(window, name) for name in names)))


MOST_CODES = 50
"""Per deployment; there are fewer."""


def refusals_store(*, ingress: str, region: str, refusals: Any, now: datetime) -> None:
    """Adds the growth since the last report. `refusals`: as an ingress reports them
    (`engine_agent.protocol.ingress_messages.Refusals`); other forms are ignored."""
    if not isinstance(refusals, dict) or not isinstance(refusals.get("codes"), dict):
        return
    since = str(refusals.get("since"))[:40]
    reported = {str(name)[:96]: _counts(codes) for name, codes in refusals["codes"].items()}
    with transaction.atomic():
        rows = {row.deployment: row for row in RefusedRequests.objects.select_for_update().filter(ingress=ingress)}
        grown = {
            name: (codes, added)
            for name, codes in reported.items()
            if any(added := _refusals_added(rows.get(name), since, codes))
        }
        if not grown:
            return
        known = set(Deployment.objects.filter(name__in=grown).values_list("name", flat=True))
        for name, (codes, added) in sorted(grown.items()):
            row = rows.get(name)
            if row is None and name and name not in known:
                continue
            row = row or RefusedRequests(ingress=ingress, deployment=name)
            row.region, row.since, row.codes, row.at = region, since, codes, now
            row.total, row.cut = min(MAX_COUNT, row.total + added[0]), min(MAX_COUNT, row.cut + added[1])
            row.save()


def refusals_forget(*, ingress: str) -> None:
    RefusedRequests.objects.filter(ingress=ingress).delete()


def _counts(codes: Any) -> dict[str, int]:
    if not isinstance(codes, Mapping):
        return {}
    return {
        str(code)[:40]: count
        for code, count in list(codes.items())[:MOST_CODES]
        if type(count) is int and 0 <= count <= MAX_COUNT
    }


def _refusals_added(row: RefusedRequests | None, since: str, codes: Mapping[str, int]) -> tuple[int, int]:
    """New refused requests and cut streams."""
    before = row.codes if row is not None and row.since == since else {}
    added = {code: max(0, count - before.get(code, 0)) for code, count in codes.items()}
    cut = added.pop(STREAM_CUT, 0)
    return sum(added.values()), cut


# Use of machines and devices: one row a node and minute, and means of longer steps. Each step is one SQL statement, so
# that a pass costs the same few statements at any size. Differences of totals are taken when they are read.

NODES_LEASE = "fleet:node-windows"
SEEN_EVERY = timedelta(days=1)
MOST = 9_000_000_000_000_000
"""Reported counts above this are clipped, as nothing real is as large."""


def _clipped(expression: str) -> str:
    """GREATEST would make 0 of what is unknown."""
    return f"CASE WHEN {expression} IS NOT NULL THEN LEAST(GREATEST(({expression})::numeric, 0), {MOST}) END"


def _host(name: str) -> str:
    return _clipped(f"report.telemetry #>> '{{host,{name}}}'")


def _device(name: str) -> str:
    return _clipped(f"device ->> '{name}'")


_FRESH = f"report.connected AND {HOLDS_SINCE}"
_SUBJECTS = f"""
INSERT INTO fleet_loadsubject (name, index, memory, seen_at)
SELECT 'node:' || report.node_id, 0, '', %(now)s FROM fleet_nodereport report WHERE {_FRESH}
ON CONFLICT (name) DO UPDATE SET seen_at = EXCLUDED.seen_at WHERE fleet_loadsubject.seen_at < %(seen_before)s
"""  # noqa: S608 - only names of columns
_NODES = f"""
INSERT INTO fleet_nodewindow (subject_id, step_s, at, {", ".join(NODE_GAUGES + NODE_TOTALS)})
SELECT subject.id, {MINUTE_S}, %(at)s,
    {_clipped("report.telemetry ->> 'host_cpu_percent'")},
    100 * ({_clipped("report.telemetry ->> 'host_memory_used_bytes'")}) / NULLIF({_host("memory_bytes")}, 0),
    100 * ({_host("filesystem_used_bytes")}) / NULLIF({_host("filesystem_bytes")}, 0),
    devices.utilisation, devices.memory, devices.clock, devices.temperature, devices.power,
    {_host("network_received_bytes")}, {_host("network_sent_bytes")},
    {_host("disk_read_bytes")}, {_host("disk_written_bytes")},
    devices.ecc, COALESCE(devices.links + links.errors, devices.links, links.errors)
FROM fleet_nodereport report
JOIN fleet_loadsubject subject ON subject.name = 'node:' || report.node_id
CROSS JOIN LATERAL (
    SELECT avg({_device("utilisation_percent")}) AS utilisation,
        100 * sum({_device("memory_used_bytes")}) / NULLIF(sum({_device("memory_total_bytes")}), 0) AS memory,
        100 * min(({_clipped("device #>> '{clocks,clock_mhz}'")})
            / NULLIF({_clipped("device #>> '{clocks,max_clock_mhz}'")}, 0)) AS clock,
        max({_device("temperature_c")}) AS temperature, sum({_device("power_watts")}) AS power,
        sum(counted.ecc) AS ecc, sum(counted.links) AS links
    FROM jsonb_array_elements(report.telemetry -> 'accelerators') AS device
    CROSS JOIN LATERAL (
        SELECT sum({_clipped("value")}) FILTER (WHERE key LIKE '%%ecc%%') AS ecc,
            sum({_clipped("value")}) FILTER (WHERE key LIKE 'nvlink%%' OR key LIKE 'pcie%%') AS links
        FROM jsonb_each_text(device -> 'errors')
    ) AS counted
) AS devices
CROSS JOIN LATERAL (
    SELECT sum({_clipped("value")}) AS errors
    FROM jsonb_array_elements(report.telemetry -> 'network') AS card(card), jsonb_each_text(card.card -> 'errors')
) AS links
WHERE {_FRESH}
ON CONFLICT DO NOTHING
"""  # noqa: S608 - only names of columns
_OF_GROUP = ", ".join(
    {"temperature_c": "max", "power_watts": "sum"}.get(name, "avg") + f"(nodes.{name})" for name in NODE_GAUGES
)
_GROUPS = f"""
INSERT INTO fleet_nodewindow (subject_id, step_s, at, {", ".join(NODE_GAUGES)})
SELECT subject.id, {MINUTE_S}, %(at)s, {_OF_GROUP}
FROM fleet_nodewindow nodes
JOIN fleet_loadsubject own ON own.id = nodes.subject_id AND own.name LIKE 'node:%%'
JOIN fleet_node node ON node.id = substr(own.name, 6)
LEFT JOIN fleet_cellmember member ON member.node_id = node.id
LEFT JOIN fleet_cell cell ON cell.id = member.cell_id
JOIN fleet_loadsubject subject
    ON subject.name IN ('deployment:' || cell.deployment_id, 'region:' || node.region_id, 'fleet')
WHERE nodes.step_s = {MINUTE_S} AND nodes.at = %(at)s
GROUP BY subject.id
ON CONFLICT DO NOTHING
"""  # noqa: S608 - only names of columns
_LONGER = f"""
INSERT INTO fleet_nodewindow (subject_id, step_s, at, {", ".join(NODE_GAUGES + NODE_TOTALS)})
SELECT subject_id, %(step_s)s, %(start)s,
    {", ".join(f"{'max' if name == 'temperature_c' else 'avg'}({name})" for name in NODE_GAUGES)},
    {", ".join(f"max({name})" for name in NODE_TOTALS)}
FROM fleet_nodewindow WHERE step_s = %(of_s)s AND at >= %(start)s AND at < %(end)s
GROUP BY subject_id
ON CONFLICT DO NOTHING
"""  # noqa: S608 - only names of columns


def node_windows_sample(*, now: datetime) -> int:
    """Stores the windows that have ended, unless they are stored. Returns the number of new rows."""
    at = _window(now, MINUTE_S)
    with lease_during(name=NODES_LEASE, ttl_s=SAMPLE_LIMIT_S, now=now) as is_ours:
        if not is_ours or NodeWindow.objects.filter(step_s=MINUTE_S, at=at).exists():
            return 0
        with transaction.atomic(), connection.cursor() as cursor:
            values = {"at": at, "now": now, "since": now - timedelta(seconds=FRESH_FOR_S)}
            cursor.execute(_SUBJECTS, {**values, "seen_before": now - SEEN_EVERY})
            cursor.execute(_NODES, values)
            stored: int = cursor.rowcount
            cursor.execute(_GROUPS, values)
            stored += cursor.rowcount
            for of_s, step_s in ((MINUTE_S, 300), (300, 3600)):
                start = _window(now, step_s)
                if not NodeWindow.objects.filter(step_s=step_s, at=start).exists():
                    end = start + timedelta(seconds=step_s)
                    cursor.execute(_LONGER, {"step_s": step_s, "of_s": of_s, "start": start, "end": end})
                    stored += cursor.rowcount
    return stored


def _window(now: datetime, step_s: int) -> datetime:
    """The start of the last window that has ended."""
    return datetime.fromtimestamp((int(now.timestamp()) // step_s - 1) * step_s, UTC)
