"""How the fleet stands, read from the database when Prometheus asks: a fixed number of small queries, none per cell.
Every web process tells the same, so rules take the maximum over them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from django.db.models import Count, F, Max, QuerySet, Sum
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from audit.models import AuditExport
from audit.selectors import audit_chain
from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.faults.models import Incident
from fleet.faults.selectors.faults import cell_guesses
from fleet.load.models import RefusedRequests
from fleet.load.planner import NODE_GAUGES
from fleet.load.selectors import Point, cache_totals, deployment_subject, last_node_windows, last_windows
from fleet.nodes.models import Node, NodeReport
from fleet.quotas.selectors import quota_uses
from fleet.reconcile.planning.states import CellState, IncidentState, NodeState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.rollouts.models import Rollout
from fleet.webhooks.models import WebhookDelivery
from fleet.webhooks.planner import DeliveryState
from kernel import clock
from kernel.control_hosts import control_hosts
from kernel.leases import lease_held_since
from kernel.loop_passes import control_standing
from traffic.async_requests.models import AsyncRequest
from traffic.batches.selectors import batch_totals, batches_by_state
from traffic.region_shares.planning.load import held, pools_waiting
from traffic.responses.selectors import kept_in_all
from traffic.routing.models import IngressReport, RoutingTable
from traffic.routing.selectors import held_deployments

Row = tuple[Sequence[str], float]


class FleetGauges(Collector):
    def collect(self) -> Iterator[GaugeMetricFamily]:
        cells = Cell.objects.exclude(state=CellState.STOPPED.value)
        by_place = _counts(cells, "region_id", "deployment_id", "state")
        yield _gauge("cells", "Cells by state.", ("region", "deployment", "state"), by_place)
        yield _gauge("cells_wanted", "Cells that deployments ask for.", ("region", "deployment"), _wanted())
        yield _gauge(
            "cells_withheld", "Cells that deployments may not have now.", ("region", "deployment", "rule"), _withheld()
        )
        yield _gauge(
            "quota_machines",
            "Machines of teams: entitled, used.",
            ("team", "instance_type", "region", "what"),
            _quotas(),
        )
        nodes = Node.objects.exclude(state=NodeState.RETIRED.value)
        yield _gauge("nodes", "Nodes by state.", ("region", "state"), _counts(nodes, "region_id", "state"))
        cordoned = _counts(nodes.filter(cordoned=True), "region_id")
        yield _gauge("nodes_cordoned", "Cordoned nodes.", ("region",), cordoned)
        connected = NodeReport.objects.filter(connected=True).exclude(node__state=NodeState.RETIRED.value)
        by_region = _counts(connected, "node__region_id")
        yield _gauge("nodes_connected", "Nodes whose agent is connected.", ("region",), by_region)
        opened = _counts(Incident.objects.filter(state=IncidentState.OPEN.value, shadow=False), "kind")
        yield _gauge("incidents_open", "Open incidents, without those in shadow.", ("kind",), opened)
        rollouts = _counts(Rollout.objects.filter(ended_at=None), "state")
        yield _gauge("rollouts", "Rollouts by state.", ("state",), rollouts)
        ingresses = _counts(IngressReport.objects.filter(connected=True), "ingress__region_id")
        yield _gauge("ingresses_connected", "Ingresses whose agent is connected.", ("region",), ingresses)
        yield _gauge("routing_table_lag", "Revisions that the slowest ingress is behind.", ("region",), _table_lag())
        yield _gauge("webhook_deliveries_waiting", "Messages to webhooks that wait.", (), _deliveries())
        yield _gauge(
            "async_requests",
            "Near-real-time requests by state.",
            ("state",),
            _counts(AsyncRequest.objects.all(), "state"),
        )
        yield _gauge("requests_held", "Requests that wait for a first cell.", ("region", "deployment"), _held())
        yield _gauge(
            "requests_refused",
            "Requests that ended with 5xx at an ingress and that no cell counts, since it began to count.",
            ("region", "deployment"),
            _refused(),
        )
        yield _gauge("cold_start_seconds", "How long a first cell is said to take.", ("deployment",), _cold_starts())
        yield _gauge(
            "cell_batch_requests",
            "Batch requests of ready cells: in their engines, waiting there, and their windows together.",
            ("region", "deployment", "what"),
            _batch_requests(),
        )
        yield _gauge(
            "cell_cache_tokens",
            "Prompt tokens of ready cells since their proxies started: sent by caches, predicted there, found there,"
            " and sent and found otherwise.",
            ("region", "deployment", "what"),
            _cache_tokens(),
        )
        yield _gauge(
            "load",
            "Load of a deployment's cells in the newest 15 s, by the names of `GET /api/v1/deployments/NAME/load`.",
            ("region", "deployment", "figure"),
            _loads(),
        )
        yield _gauge(
            "machines_use",
            "Use of a deployment's machines and accelerators in the last minute, by the names of `nodes/{id}/use`.",
            ("deployment", "figure"),
            _use(),
        )
        yield _gauge(
            "cells_of_role", "Cells by role: wanted, ready.", ("region", "deployment", "role", "what"), _cells_of_role()
        )
        yield _gauge(
            "decode_requests",
            "Requests of ready decode cells since their proxies started: handed over, fallen back, done alone by rule.",
            ("region", "deployment", "outcome"),
            _decode_requests(),
        )
        yield _gauge(
            "speculation_tokens",
            "Of cells that guess, in the last hour: drafts, tokens guessed in them, tokens accepted.",
            ("region", "deployment", "model_version", "what"),
            _speculation_tokens(),
        )
        yield _gauge("batches", "Open batches by state.", ("state",), _batches())
        yield _gauge("responses", "Kept responses.", (), _responses())
        yield _gauge("responses_bytes", "Bytes of kept responses.", (), _responses_bytes())
        yield _gauge("agents_listened", "1 while a web process listens to agents.", (), _listened())
        yield _gauge("control_pass_age_seconds", "Since a control loop's last whole pass.", ("loop",), _pass_ages())
        yield _gauge("housekeeping_queue_age_seconds", "How long housekeeping waits in its queue.", (), _queue_age())
        yield _gauge(
            "control_host_silent_seconds", "Since a host of the control plane was heard.", ("host",), _silent()
        )
        yield _gauge("audit_head", "Number of the last audit record.", (), _audit_head())
        yield _gauge("audit_records_unexported", "Audit records that wait for export.", ("target",), _unexported())


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterator[Row]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"switchyard_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counts(rows: QuerySet[Any], *fields: str) -> Iterator[Row]:
    for *labels, count in rows.order_by().values_list(*fields).annotate(Count("pk")):
        yield labels, count


def _wanted() -> Iterator[Row]:
    rows = DeploymentRegion.objects.order_by().values("region_id", "deployment_id").annotate(n=Sum("cells"))
    for row in rows:
        yield (row["region_id"], str(row["deployment_id"])), row["n"]


def _withheld() -> Iterator[Row]:
    for place in DeploymentRegion.objects.filter(cells_granted__lt=F("cells")):
        labels = (place.region_id, place.deployment_id, place.grant_rule)
        yield labels, place.cells - place.cells_in_force


def _quotas() -> Iterator[Row]:
    for use in quota_uses():
        owner = (use.quota.team, use.quota.instance_type_id, use.quota.region_id or "")
        yield (*owner, "entitled"), use.quota.machines
        yield (*owner, "used"), use.used


def _table_lag() -> Iterator[Row]:
    newest = dict(RoutingTable.objects.order_by().values_list("region_id").annotate(Max("revision")))
    lag: dict[str, int] = {}
    for region, revision in IngressReport.objects.values_list("ingress__region_id", "revision"):
        lag[region] = max(lag.get(region, 0), newest.get(region, 0) - revision)
    for region, behind in lag.items():
        yield (region,), behind


def _deliveries() -> Iterator[Row]:
    yield (), WebhookDelivery.objects.filter(state=DeliveryState.PENDING.value).count()


def _held() -> Iterator[Row]:
    waiting: dict[tuple[str, str], float] = {}
    for region, telemetry in IngressReport.objects.values_list("ingress__region_id", "telemetry"):
        for name in pools_waiting(telemetry):
            waiting[region, name] = waiting.get((region, name), 0.0) + held(telemetry, name)
    yield from waiting.items()


def _refused() -> Iterator[Row]:
    rows = RefusedRequests.objects.order_by().values_list("region", "deployment").annotate(Sum("total"))
    for region, deployment, total in rows:
        yield (region, deployment), total


def _cold_starts() -> Iterator[Row]:
    for name, hold in held_deployments().items():
        yield (name,), hold.hold.cold_start_s


def _cells_of_role() -> Iterator[Row]:
    ready = Cell.objects.filter(state=CellState.READY.value).order_by()
    counts: Counter[tuple[str, str, str]] = Counter()
    for region, deployment, role, n in ready.values_list("region_id", "deployment_id", "role").annotate(n=Count("pk")):
        counts[region, deployment, role] = n
    for place in DeploymentRegion.objects.filter(prefill__gt=0):
        for role in CellRole:
            labels = (place.region_id, place.deployment_id, role.value)
            yield (*labels, "wanted"), place.split.of(role)
            yield (*labels, "ready"), counts[labels]


def _decode_requests() -> Iterator[Row]:
    cell = "node__member__cell__"
    reports = NodeReport.objects.filter(
        **{f"{cell}state": CellState.READY.value, f"{cell}role": CellRole.DECODE.value},
        node__member__rank=0,
        cell=F("node__member__cell_id"),
        load__handovers__isnull=False,
    )
    totals: Counter[tuple[str, str, str]] = Counter()
    for region, deployment, load in reports.values_list(f"{cell}region_id", f"{cell}deployment_id", "load__handovers"):
        counted = load or {}
        totals[region, deployment, "handed_over"] += counted.get("handovers_total", 0)
        totals[region, deployment, "fallback"] += sum(counted.get("fallbacks", {}).values())
        totals[region, deployment, "alone"] += sum(counted.get("alone", {}).values())
    yield from totals.items()


def _speculation_tokens() -> Iterator[Row]:
    totals: Counter[tuple[str, str, str, str]] = Counter()
    for each in cell_guesses(clock.now()):
        place = (each.cell.region_id, each.cell.deployment_id, each.cell.model_version.reference)
        for what in ("drafts", "guessed", "accepted"):
            totals[*place, what] += getattr(each, what)
    yield from totals.items()


def _batch_requests() -> Iterator[Row]:
    for (region, deployment), each in batch_totals(clock.now()).items():
        yield (region, deployment, "running"), each.running
        yield (region, deployment, "waiting"), each.waiting
        yield (region, deployment, "window"), each.window


def _cache_tokens() -> Iterator[Row]:
    for (region, deployment), totals in cache_totals(clock.now()).items():
        for what, tokens in totals.items():
            yield (region, deployment, what), tokens


_LOAD_FIGURES = tuple(field.name for field in fields(Point))


def _loads() -> Iterator[Row]:
    """Figures that no cell reported are left out."""
    pairs = DeploymentRegion.objects.values_list("region_id", "deployment_id")
    places = {deployment_subject(deployment, region): (region, deployment) for region, deployment in pairs}
    for subject, point in last_windows(places, clock.now()).items():
        for figure in _LOAD_FIGURES:
            if (value := getattr(point, figure)) is not None:
                yield (*places[subject], figure), value


def _use() -> Iterator[Row]:
    names = {deployment_subject(name): name for name in Deployment.objects.values_list("name", flat=True)}
    for subject, point in last_node_windows(names, clock.now()).items():
        for figure in NODE_GAUGES:
            if (value := point[figure]) is not None:
                yield (names[subject], figure), value


def _batches() -> Iterator[Row]:
    for row in batches_by_state():
        yield (row["state"],), row["n"]


def _responses() -> Iterator[Row]:
    yield (), kept_in_all()[0]


def _responses_bytes() -> Iterator[Row]:
    yield (), kept_in_all()[1]


def _listened() -> Iterator[Row]:
    yield (), float(lease_held_since(name=LISTENING_LEASE, now=clock.now()) is not None)


def _pass_ages() -> Iterator[Row]:
    for loop in control_standing().loops:
        yield (loop.loop,), loop.age_s


def _queue_age() -> Iterator[Row]:
    if (queue_s := control_standing().queue_s) is not None:
        yield (), queue_s


def _silent() -> Iterator[Row]:
    for host in control_hosts().hosts:
        yield (host.name,), host.silent_s


def _audit_head() -> Iterator[Row]:
    yield (), audit_chain().head_number


def _unexported() -> Iterator[Row]:
    head = audit_chain().head_number
    for target, number in AuditExport.objects.values_list("target", "number"):
        yield (target.partition("://")[0],), head - number
