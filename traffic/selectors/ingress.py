"""Ingresses with what they report and should run, and whether every one follows its table and sees its cells."""

from django.db.models import OuterRef, QuerySet, Subquery, TextField, Value
from django.db.models.functions import Coalesce

from engine_agent.protocol.ingress_messages import APPLICATION_TLS_SINCE
from engine_agent.protocol.machine_messages import release_of
from engine_agent.protocol.states import AgentKind, PlainHttp
from fleet.planning.agent_rollouts import AgentView, Standing
from traffic.models import Ingress, RoutingTable
from traffic.selectors.routing import UnreadableTable, latest_tables, routed_cells, table_message

PROTOCOL = "protocol"
"""Part of a report's telemetry: the protocol of the agent that sent it."""


def ingresses_described() -> QuerySet[Ingress]:
    """Ingresses with their last report, and `wanted_revision` of their region's newest table, 0 before the first.

    Of one that never reported `connected` is False, `revision` 0 and `reason` "".
    """
    newest = RoutingTable.objects.filter(region_id=OuterRef("region_id")).order_by("-revision")
    return Ingress.objects.select_related("report", "region").annotate(
        connected=Coalesce("report__connected", Value(False)),
        revision=Coalesce("report__revision", Value(0)),
        reason=Coalesce("report__reason", Value(""), output_field=TextField()),
        wanted_revision=Coalesce(Subquery(newest.values("revision")[:1]), Value(0)),
    )


def serves_plain_problem(ingress: Ingress) -> str:
    """That an ingress serves without TLS whom its region refuses, because its agent knows of no such thing; "": it
    does not. Its region and report are read before."""
    report = getattr(ingress, "report", None)
    if report is None or ingress.region.plain_http == PlainHttp.SERVE:
        return ""
    is_able = report.telemetry.get(PROTOCOL, APPLICATION_TLS_SINCE) >= APPLICATION_TLS_SINCE
    return "" if is_able else unable_to_refuse(ingress.id)


def unable_to_refuse(ingress: str) -> str:
    """The sentence about an ingress of an older protocol in a region that refuses plain HTTP."""
    return (
        f"{ingress} runs an agent that cannot refuse plain HTTP, and serves it to everybody: upgrade agents"
        " (`switchyard agents upgrade`)"
    )


def ingress_agents() -> list[AgentView]:
    """Agents of ingresses, as their rollouts see them."""
    rows = Ingress.objects.select_related("report", "region").exclude(report=None)
    return [
        AgentView(
            id=row.id,
            kind=AgentKind.INGRESS.value,
            region=row.region_id,
            provider=row.region.provider,
            release=release_of(row.report.agent_version),
            connected=row.report.connected,
            connection_since=row.report.connection_changed_at,
            unwell=row.report.reason,
            serves_requests=True,
            standing=Standing(pid=row.report.haproxy_pid),
        )
        for row in rows
    ]


def ingresses_waiting() -> tuple[str, ...]:
    """What keeps requests from being answered, a sentence each; empty when nothing does."""
    tables = latest_tables()
    waiting = []
    for ingress in Ingress.objects.select_related("report"):
        table, report = tables.get(ingress.region_id), getattr(ingress, "report", None)
        if table is None:
            waiting.append(f"{ingress.region_id} has no routing table yet")
        elif report is None or not report.connected:
            waiting.append(f"ingress {ingress.id} is not connected")
        elif report.revision < table.revision:
            waiting.append(f"ingress {ingress.id} runs revision {report.revision} of {table.revision}")
        else:
            waiting += _cells_not_up(ingress.id, table, report.cells)
    return tuple(waiting)


def _cells_not_up(ingress: str, table: RoutingTable, seen: dict[str, str]) -> list[str]:
    try:
        routed = sorted(routed_cells(table_message(table)))
    except UnreadableTable as error:
        return [str(error)]
    return [
        f"ingress {ingress} sees {cell} {seen.get(cell, 'not at all')}" for cell in routed if seen.get(cell) != "up"
    ]
