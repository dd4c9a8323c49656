"""Stores what agents report: one statement for all that came in since the last time.

The statement compares with what was known, so that only news rings doorbells. What one agent says can cost another
nothing: a row that cannot be stored is dropped alone.
"""

import json
import logging
from datetime import datetime
from typing import Any

import msgspec
from django.db import connection, transaction

from fleet.models import Node
from fleet.services.signal import signal_record
from kernel import hints, live
from kernel.events import event_record
from kernel.storable import UNSTORABLE, storable_json
from kernel.tones import Tone

_STORE = """
WITH said AS (
    SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS row(
        node text, connection text, connected boolean, changed_at timestamptz, seen_at timestamptz, boot_id text,
        agent_version text, state text, cell text, generation int, rank int, reason text, engine_pid int,
        healthy boolean, health jsonb, load jsonb, telemetry jsonb, steps jsonb)
), before AS (
    SELECT node_id, connected, state, cell, generation, unhealthy_since IS NULL AS healthy FROM fleet_nodereport
    WHERE node_id IN (SELECT node FROM said)
), stored AS (
    INSERT INTO fleet_nodereport AS known (node_id, connection, connected, connection_changed_at, last_seen_at, boot_id,
        agent_version, state, cell, generation, rank, reason, engine_pid, unhealthy_since, health, load, telemetry,
        steps)
    SELECT said.node, connection, connected, changed_at, seen_at, boot_id, agent_version, said.state, cell, generation,
        rank, said.reason, engine_pid, CASE WHEN NOT healthy THEN seen_at END, health, load, telemetry,
        steps
    FROM said JOIN fleet_node ON fleet_node.id = said.node AND fleet_node.state <> 'retired'
    ON CONFLICT (node_id) DO UPDATE SET
        connection = EXCLUDED.connection, connected = EXCLUDED.connected,
        connection_changed_at = EXCLUDED.connection_changed_at, last_seen_at = EXCLUDED.last_seen_at,
        boot_id = EXCLUDED.boot_id, agent_version = EXCLUDED.agent_version, state = EXCLUDED.state,
        cell = EXCLUDED.cell, generation = EXCLUDED.generation, rank = EXCLUDED.rank, reason = EXCLUDED.reason,
        engine_pid = EXCLUDED.engine_pid, health = EXCLUDED.health, load = EXCLUDED.load,
        telemetry = EXCLUDED.telemetry, steps = EXCLUDED.steps,
        unhealthy_since = CASE WHEN EXCLUDED.unhealthy_since IS NULL THEN NULL
                               ELSE COALESCE(known.unhealthy_since, EXCLUDED.unhealthy_since) END
    WHERE EXCLUDED.connected OR known.connection = EXCLUDED.connection
    RETURNING node_id, connected, state, cell, generation, unhealthy_since IS NULL AS healthy
)
SELECT stored.node_id FROM stored LEFT JOIN before USING (node_id)
WHERE before.node_id IS NULL
   OR (before.connected, before.state, before.cell, before.generation, before.healthy)
      IS DISTINCT FROM (stored.connected, stored.state, stored.cell, stored.generation, stored.healthy)
"""

log = logging.getLogger(__name__)


class NodeRow(msgspec.Struct, frozen=True):
    """The latest word of one node's agent. A row with `connected` False counts only for the connection that it ends."""

    node: str
    connection: str
    connected: bool
    changed_at: datetime
    seen_at: datetime
    boot_id: str = ""
    agent_version: str = ""
    state: str = "idle"
    cell: str = ""
    generation: int = 0
    rank: int | None = None
    reason: str = ""
    engine_pid: int | None = None
    healthy: bool = True
    health: Any = None
    load: Any = None
    telemetry: Any = {}
    steps: Any = None


def reports_store(rows: list[NodeRow]) -> list[str]:
    """Write the rows, and return the nodes of which something a planner cares about changed.

    A row that PostgreSQL refuses (a number out of range, a name too long) is dropped, and its node is logged.
    """
    if not rows:
        return []
    try:
        return _store(rows)
    except UNSTORABLE as refusal:
        if len(rows) == 1:
            log.warning("dropped what %s reported: %s", rows[0].node, refusal)
            return []
    middle = len(rows) // 2
    return reports_store(rows[:middle]) + reports_store(rows[middle:])


def _store(rows: list[NodeRow]) -> list[str]:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_STORE, {"rows": storable_json(msgspec.json.encode(rows))})
            changed = [str(node) for (node,) in cursor.fetchall()]
        live.push("load")
        if changed:
            live.push("nodes")
            hints.ring("fleet.reconcile")
    return changed


def node_introduced(
    *, node: str, topology: tuple[str, ...], fingerprint: dict[str, str], accelerators: tuple[str, ...]
) -> None:
    """What a hello says of the machine itself."""
    said = msgspec.json.encode({"fingerprint": fingerprint, "topology": topology, "accelerators": accelerators})
    changes: dict[str, Any] = json.loads(storable_json(said))
    if not topology:
        del changes["topology"]
    Node.objects.filter(id=node).update(**changes)


def fault_record(*, node: str, signature: str, summary: str, evidence: dict[str, Any], now: datetime) -> None:
    """Write evidence of a fault into the timeline, and keep it if it is the hardware's. Planners do the rest."""
    known = Node.objects.filter(id=node).select_related("member__cell").first()
    if known is None:
        return
    member = getattr(known, "member", None)
    signature, summary, evidence = json.loads(storable_json(msgspec.json.encode((signature, summary, evidence))))
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
        signal_record(node=known, cell=cell, signature=signature, summary=summary, evidence=evidence, now=now)
