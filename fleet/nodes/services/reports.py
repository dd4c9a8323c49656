"""Stores agents' reports, hellos, faults and logs, and the web processes that receive them. All reports since the last
call are stored in one statement, which compares them with the stored ones, so that only changes send wake-ups. A report
that cannot be stored is dropped; the others are stored. Log requests are part of a node's desired state and expire."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import connection, transaction
from msgspec import structs
from psycopg import sql

from engine_agent.protocol.messages import Hello, LogTail, Report
from fleet.clouds.base import Machine
from fleet.faults.services.incidents import hardware_fault_record
from fleet.nodes.models import AgentListener, Node, NodeLog, NodeReport
from fleet.nodes.planner import LISTENING_TTL
from fleet.nodes.services.nodes import machine_store
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.leases import lease_take
from kernel.refusals import Conflict
from kernel.sanitize import UNSTORABLE_ERRORS, json_without_nul
from kernel.tones import Tone

_COLUMNS = tuple(field.attname for field in NodeReport._meta.concrete_fields)
_DEFAULTS = {field.attname: field.get_default() for field in NodeReport._meta.concrete_fields if not field.null}
_DERIVED = "unhealthy_since"
"""The only column whose new value depends on its old one: since when the node has been unhealthy without a break."""
# Each part reads a table or the rows once, whatever the query planner estimates. All see the same snapshot, so `before`
# is the previous report. A report of an older connection does not replace that of a newer one, unless the newer one is
# silent or from before a clock was set back.
_STORE = sql.SQL("""
WITH reported AS (
    SELECT * FROM jsonb_populate_recordset(NULL::fleet_nodereport, %(rows)s::jsonb)
), stored AS (
    INSERT INTO fleet_nodereport AS known ({columns})
    SELECT {values} FROM reported JOIN fleet_node ON fleet_node.id = reported.node_id AND fleet_node.state <> 'retired'
    ON CONFLICT (node_id) DO UPDATE SET
        {updates},
        unhealthy_since = CASE WHEN EXCLUDED.unhealthy_since IS NULL THEN NULL
                               ELSE COALESCE(known.unhealthy_since, EXCLUDED.unhealthy_since) END
    WHERE known.connection = EXCLUDED.connection
       OR EXCLUDED.connected AND (
           known.connected AND known.connection_changed_at > EXCLUDED.connection_changed_at
           AND known.last_seen_at - EXCLUDED.last_seen_at BETWEEN interval '-20 s' AND interval '60 s'
       ) IS NOT TRUE
    RETURNING node_id, connected, quiet, state, cell, generation, unhealthy_since IS NULL AS healthy
)
SELECT stored.node_id FROM stored LEFT JOIN fleet_nodereport AS former USING (node_id)
WHERE former.node_id IS NULL
   OR (former.connected, former.quiet, former.state, former.cell, former.generation, former.unhealthy_since IS NULL)
      IS DISTINCT FROM (stored.connected, stored.quiet, stored.state, stored.cell, stored.generation, stored.healthy)
""").format(
    columns=sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)),
    values=sql.SQL(", ").join(sql.Identifier("reported", column) for column in _COLUMNS),
    updates=sql.SQL(", ").join(
        sql.SQL("{column} = EXCLUDED.{column}").format(column=sql.Identifier(column))
        for column in _COLUMNS
        if column not in ("node_id", _DERIVED)
    ),
)

_HELLOS = """
UPDATE fleet_node AS known SET fingerprint = stated.fingerprint, accelerators = stated.accelerators,
    topology = stated.topology
FROM (
    SELECT one.id, one.fingerprint, one.accelerators,
           CASE WHEN one.topology = '[]' THEN node.topology ELSE one.topology END AS topology
    FROM jsonb_to_recordset(%s::jsonb) AS one (id text, fingerprint jsonb, accelerators jsonb, topology jsonb)
    JOIN fleet_node AS node ON node.id = one.id
) AS stated
WHERE known.id = stated.id AND (known.fingerprint, known.accelerators, known.topology)
    IS DISTINCT FROM (stated.fingerprint, stated.accelerators, stated.topology)
"""

log = logging.getLogger(__name__)


class ReceivedReport(msgspec.Struct, frozen=True):
    """The latest report of a node's agent, and how it arrived. With `connected` False it only ends its connection.
    `quiet`: the agent has sent nothing since `last_seen_at`, although its connection is open. The
    names of its fields, of the report and of its observations are columns of `NodeReport`, so a new field needs no
    mapping."""

    node_id: str
    connection: str
    connected: bool
    connection_changed_at: datetime
    last_seen_at: datetime
    report: Report
    listener: str = ""
    boot_id: str = ""
    agent_version: str = ""
    quiet: bool = False

    @property
    def healthy(self) -> bool:
        return self.report.health is None or self.report.health.ok


def reports_store(rows: list[ReceivedReport]) -> list[str]:
    """Stores the rows, and returns the nodes with changes relevant for planners. A row that PostgreSQL rejects (a
    number out of range, a name too long) is dropped and its node logged."""
    if not rows:
        return []
    try:
        return _store_rows(rows)
    except UNSTORABLE_ERRORS as refusal:
        if len(rows) == 1:
            log.warning("dropped what %s reported: %s", rows[0].node_id, refusal)
            return []
    middle = len(rows) // 2
    return reports_store(rows[:middle]) + reports_store(rows[middle:])


def _store_rows(rows: list[ReceivedReport]) -> list[str]:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(
                _STORE, {"rows": json_without_nul(msgspec.json.encode([_report_columns(row) for row in rows]))}
            )
            changed = [str(node) for (node,) in cursor.fetchall()]
        live.push("load")
        if changed:
            live.push("nodes")
            wake_ups.send("fleet.reconcile")
        if any(row.quiet or not row.connected for row in rows):
            wake_ups.send("fleet.provision")
    return changed


def _report_columns(received: ReceivedReport) -> dict[str, Any]:
    """Column -> value. A column that is not nullable gets its default if the value is missing."""
    stated = structs.asdict(received)
    stated |= structs.asdict(stated.pop("report"))
    stated |= structs.asdict(stated.pop("observed"))
    stated[_DERIVED] = None if received.healthy else received.last_seen_at
    values = {column: stated.get(column) for column in _COLUMNS}
    return {column: _DEFAULTS.get(column) if value is None else value for column, value in values.items()}


def hellos_store(hellos: Sequence[Hello]) -> dict[str, Conflict]:
    """Stores node agents' hellos in one statement that writes only changes. Returns the errors by node: it cannot be
    stored, address and ports are unknown, or another node has them."""
    latest = {hello.id: hello for hello in hellos}
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            stated = [_hello_columns(hello) for hello in latest.values()]
            cursor.execute(_HELLOS, [json_without_nul(msgspec.json.encode(stated))])
    except UNSTORABLE_ERRORS as error:
        if len(latest) == 1:
            return {node: Conflict(f"the hello of {node} cannot be stored: {error}") for node in latest}
        middle, each = len(latest) // 2, list(latest.values())
        return hellos_store(each[:middle]) | hellos_store(each[middle:])
    placeless = set(Node.objects.filter(id__in=latest, port_base=None).values_list("id", flat=True))
    refused = {}
    for node in (node for node in latest if node in placeless):
        try:
            _store_stated_machine(latest[node])
        except Conflict as refusal:
            refused[node] = refusal
    return refused


def _hello_columns(hello: Hello) -> dict[str, Any]:
    accelerators = hello.inventory.accelerators if hello.inventory else ()
    return {
        "id": hello.id,
        "fingerprint": hello.fingerprint,
        "topology": hello.topology,
        "accelerators": accelerators,
    }


def _store_stated_machine(hello: Hello) -> None:
    inventory = hello.inventory
    address = inventory.address.replace("\0", "") if inventory else ""
    if not inventory or not address:
        raise Conflict(f"the address and ports of {hello.id} are not known, and its hello does not state them")
    machine_store(node=hello.id, machine=Machine(address, inventory.port_base))


def fault_record(*, node: str, signature: str, summary: str, evidence: dict[str, Any], now: datetime) -> None:
    """Records evidence of a fault as an event, and stores it if it is a hardware fault. Planners decide what
    follows."""
    known = Node.objects.filter(id=node).select_related("member__cell").first()
    if known is None:
        return
    member = getattr(known, "member", None)
    signature, summary, evidence = json.loads(json_without_nul(msgspec.json.encode((signature, summary, evidence))))
    with transaction.atomic():
        event_record(
            kind=f"fault.{signature}"[:64],
            message=f"{node}: {summary}",
            tone=Tone.BAD,
            now=now,
            region=known.region_id,
            node=node,
            cell=member.cell_id if member else "",
            deployment=member.cell.deployment_id if member else "",
            detail=evidence,
        )
        cell = member.cell_id if member else ""
        hardware_fault_record(node=known, cell=cell, signature=signature, summary=summary, evidence=evidence, now=now)


FORGOTTEN_AFTER = timedelta(hours=1)
"""After its end, when it no longer explains any silence."""
# A listener that was not renewed in time starts over.
_RENEW = """
INSERT INTO fleet_agentlistener AS known (id, since, until) VALUES (%(id)s, %(since)s, %(until)s)
ON CONFLICT (id) DO UPDATE SET
    since = CASE WHEN EXCLUDED.since IS NULL THEN NULL
                 WHEN known.until > %(now)s THEN COALESCE(known.since, EXCLUDED.since)
                 ELSE EXCLUDED.since END,
    until = EXCLUDED.until
RETURNING xmax = 0
"""


def listener_renew(*, listener: str, keeps_up: bool, now: datetime) -> None:
    """Records that this web process runs, and whether it keeps up with its agents. A lease shared by all web processes
    shows that some process does."""
    since = now if keeps_up else None
    until = now + LISTENING_TTL
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_RENEW, {"id": listener, "since": since, "until": until, "now": now})
        (is_new,) = cursor.fetchone()
        if is_new:
            AgentListener.objects.filter(until__lt=now - FORGOTTEN_AFTER).delete()
        if keeps_up:
            lease_take(name=LISTENING_LEASE, holder="web", ttl_s=LISTENING_TTL.total_seconds(), now=now)


REQUEST_TTL = timedelta(seconds=60)
RENEW_BEFORE = timedelta(seconds=25)
"""Pages poll every few seconds; the request is written and sent to the agent only this often."""
KEPT_FOR = timedelta(hours=1)
_REQUEST = """
WITH due AS (
    INSERT INTO fleet_nodelog AS known (node_id, wished_until, cell, generation, logs)
    SELECT id, %(until)s, '', 0, '{}' FROM fleet_node WHERE id = ANY(%(nodes)s) ORDER BY id
    ON CONFLICT (node_id) DO UPDATE SET wished_until = EXCLUDED.wished_until WHERE known.wished_until <= %(renew)s
    RETURNING node_id
)
UPDATE fleet_node SET desired_version = desired_version + 1 WHERE id IN (SELECT node_id FROM due) RETURNING id
"""


def node_logs_request(*, nodes: Iterable[str], now: datetime) -> None:
    """Records that a user reads these nodes' logs. Always one statement."""
    values: dict[str, Any] = {"nodes": sorted(set(nodes)), "until": now + REQUEST_TTL, "renew": now + RENEW_BEFORE}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_REQUEST, values)
            due = [str(node) for (node,) in cursor.fetchall()]
        if due:
            live.push_desired(due)


def node_logs_store(*, tails: Mapping[str, LogTail], now: datetime) -> None:
    """Stores the lines that agents sent, unless no user reads that node's logs."""
    with transaction.atomic():
        for node, tail in sorted(tails.items()):
            logs = json.loads(json_without_nul(msgspec.json.encode(tail.logs)))
            changes = {"said_at": now, "cell": (tail.cell or "")[:160], "generation": tail.generation, "logs": logs}
            if NodeLog.objects.filter(node=node, wished_until__gt=now - REQUEST_TTL).update(**changes):
                live.push("logs", node)


def node_logs_trim(*, now: datetime) -> None:
    NodeLog.objects.filter(wished_until__lt=now - KEPT_FOR).delete()
