"""Nodes over HTTP: read them, act on one, and enrol their agents. Parses and renders; services decide."""

from functools import partial
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.states import AgentKind, EngineState, MemberRole
from fleet.agents.services.enrolment import PEER_CERTIFICATE, EnrolmentRefused, agent_enrol
from fleet.cells.api import EndedHidden
from fleet.cells.models import CellMember
from fleet.faults.planning.views import Rung
from fleet.faults.services.repairs import repair_request
from fleet.load.api import WithUse
from fleet.load.selectors import node_subject
from fleet.machines.services.machines import InvitationRefused, is_ticket, join_refused, machine_enrol
from fleet.machines.services.revocation import node_revoke
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.selectors import nodes_described
from fleet.nodes.services.nodes import (
    MAX_CHECKED_TOGETHER,
    node_checks_request,
    node_cordon,
    node_drain,
    node_replacement_request,
    node_uncordon,
)
from fleet.reconcile.planning.states import NodeState, choices
from kernel import clock
from kernel.addresses import client_network
from kernel.decoding import decode_json
from kernel.rest.serializers import WhySerializer
from kernel.rest.throttling import count_request
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone

SPARE = "spare"
"""The role of a node that is in no cell."""
ROLES = [*choices(MemberRole), (SPARE, "Spare")]
IN_ROLE = {
    MemberRole.LEADER.value: Q(member__rank=0),
    MemberRole.FOLLOWER.value: Q(member__rank__gt=0),
    SPARE: Q(member__isnull=True),
}
MAX_ENROLMENT_BYTES = 4096


class EngineSerializer(serializers.ModelSerializer[NodeReport]):
    state = serializers.ChoiceField(choices=choices(EngineState))
    pid = serializers.IntegerField(source="engine_pid", allow_null=True)
    generation = serializers.IntegerField(help_text="Generation of the cell that the report is about.")

    class Meta:
        model = NodeReport
        fields = ["state", "reason", "pid", "generation"]


class NodeSerializer(serializers.ModelSerializer[Node]):
    region = serializers.CharField(source="region_id")
    instance_type = serializers.CharField(source="instance_type_id")
    tone = serializers.ChoiceField(choices=choices(Tone))
    cordoned = serializers.BooleanField(help_text="Excluded from new placements.")
    cell = serializers.CharField(source="member.cell_id", default=None, allow_null=True, help_text="Null for a spare.")
    deployment = serializers.CharField(source="member.cell.deployment_id", default=None, allow_null=True)
    rank = serializers.IntegerField(source="member.rank", default=None, allow_null=True)
    role = serializers.SerializerMethodField(help_text="`spare`: in no cell.")
    machine = serializers.CharField(help_text="Its machine, which it shares with other nodes if that has a layout.")
    topology = serializers.ListField(child=serializers.CharField(), help_text="Network nodes, widest first.")
    fingerprint = serializers.DictField(child=serializers.CharField(), help_text="Software of the node.")
    accelerators = serializers.ListField(
        child=serializers.CharField(), help_text="One line per device that its agent found."
    )
    prefetch = serializers.ListField(
        child=serializers.CharField(), help_text="Versions whose build and weights it fetches in advance."
    )
    connected = serializers.BooleanField()
    last_seen_at = serializers.DateTimeField(source="report.last_seen_at", default=None, allow_null=True)
    agent_version = serializers.CharField()
    engine = EngineSerializer(
        source="report",
        read_only=True,
        allow_null=True,
        help_text="Latest report of its agent; null before the first.",
    )

    holds = serializers.SerializerMethodField(
        help_text="Its engine builds and its fetched weights (`artifacts`, on a spare with the part in memory as "
        "`memory_bytes`), those on their way with their progress as `fetching`, and by digest the `troubles` of what "
        "it should fetch in advance; null before its first report."
    )
    checks = serializers.SerializerMethodField(
        help_text="Latest deep checks: `request`, `began_at`, `ended_at` (null: running), `results`."
    )

    class Meta:
        model = Node
        fields = [
            "id", "region", "instance_type", "state", "reason", "tone", "cordoned", "cell", "deployment", "rank",
            "role", "machine", "address", "port_base", "topology", "fingerprint", "accelerators", "prefetch",
            "connected", "last_seen_at", "agent_version", "engine", "holds", "checks", "state_since", "created_at",
        ]  # fmt: skip
        examples = {
            "id": "n-0a1b2c3d",
            "machine": "m-7c1d9e02",
            "topology": ["local", "us-east-1", "rack-1"],
            "fingerprint": {"agent": "0.1.0", "kernel": "6.8.0", "sim.engine": "sim 0.1.0", "sim.python": "3.11.7"},
        }

    @extend_schema_field(serializers.ChoiceField(choices=ROLES))
    def get_role(self, node: Node) -> str:
        member: CellMember | None = getattr(node, "member", None)
        return member.role.value if member else SPARE

    @extend_schema_field(serializers.DictField(allow_null=True))
    def get_holds(self, node: Node) -> dict[str, Any] | None:
        report: NodeReport | None = getattr(node, "report", None)
        if report is None:
            return None
        prefetched = report.telemetry.get("prefetched") or {}
        return {
            "builds": report.telemetry.get("builds", []),
            "artifacts": prefetched.get("artifacts", []),
            "troubles": prefetched.get("troubles", {}),
        }

    @extend_schema_field(serializers.DictField(allow_null=True))
    def get_checks(self, node: Node) -> dict[str, Any] | None:
        report: NodeReport | None = getattr(node, "report", None)
        return report.telemetry.get("checks") if report is not None else None


class CheckSerializer(WhySerializer):
    with_nodes = serializers.ListField(
        child=serializers.CharField(max_length=64),
        required=False,
        default=list,
        max_length=MAX_CHECKED_TOGETHER,
        help_text="Spare nodes; links between all of them are checked.",
    )


class NodeFilter(EndedHidden):
    ended = NodeState.RETIRED.value

    state = filters.MultipleChoiceFilter(
        choices=choices(NodeState), distinct=False, help_text="May be repeated. Default: all but retired nodes."
    )
    region = filters.CharFilter(field_name="region_id")
    instance_type = filters.CharFilter(field_name="instance_type_id")
    role = filters.MultipleChoiceFilter(choices=ROLES, method="in_role", help_text="May be repeated.")
    cell = filters.CharFilter(field_name="member__cell_id")
    deployment = filters.CharFilter(field_name="member__cell__deployment_id")
    cordoned = filters.BooleanFilter()
    connected = filters.BooleanFilter()

    def in_role(self, queryset: QuerySet[Node], name: str, value: list[str]) -> QuerySet[Node]:
        wanted = Q()
        for role in value:
            wanted |= IN_ROLE[role]
        return queryset.filter(wanted)


class NodeViewSet(WithUse, ReadOnlyModelViewSet[Node]):
    """Machines that run an agent."""

    serializer_class = NodeSerializer
    filterset_class = NodeFilter
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("id", "state", "cordoned", "state_since", "created_at", "region", "instance_type")
    watch_kind = "node"
    measured = frozenset({"machine", "last_seen_at", "connected", "engine", "agent_version", "checks"})
    aliases = ("no",)
    columns = "NODE=id, STATE, REGION, TYPE=instance_type, ROLE, CELL, CORDONED, CONNECTED, SINCE=state_since:age"

    def get_queryset(self) -> QuerySet[Node]:
        return nodes_described()

    def use_subject(self, row: Node) -> str:
        return node_subject(row.pk)

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def cordon(self, request: Request, id: str) -> Response:
        """Excludes a node from new placements. Its cell keeps running. Has no effect if it is cordoned; 409 if it is
        retired."""
        return self.act_on_object(request, node_cordon, "node_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def uncordon(self, request: Request, id: str) -> Response:
        """Allows placements on a node again and declares it healthy: if it is faulty and in no cell it becomes ready,
        its incidents close, and a scheduled replacement is cancelled. Has no effect if it is not cordoned; 409 if it is
        retired."""
        return self.act_on_object(request, node_uncordon, "node_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def drain(self, request: Request, id: str) -> Response:
        """Cordons a node and drains its cell. A cell on other nodes takes its place, and the machine stays. 409 if the
        node is retired or its cell is not ready."""
        return self.act_on_object(request, node_drain, "node_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def replace(self, request: Request, id: str) -> Response:
        """Replaces a node: its cell is drained as the disruption ledger allows, starts again with another node, and the
        machine is terminated. 409 if the node is not in use or is being replaced already."""
        return self.act_on_object(request, node_replacement_request, "node_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, id: str) -> Response:
        """Revokes a node's credential and certificates. Its connection is closed within 5 s, and its cell moves to
        other nodes. 409 if it is retired."""
        return self.act_on_object(request, node_revoke, "node_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def reset(self, request: Request, id: str) -> Response:
        """Resets the accelerators of a node that is in no cell; deep checks follow. It is out of use meanwhile, and is
        replaced if they fail. 409 if it is in a cell, has no accelerator, shares its machine with other nodes, or is
        being repaired."""
        return self.act_on_object(request, partial(repair_request, rung=Rung.RESET), "node_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def reboot(self, request: Request, id: str) -> Response:
        """Reboots the machine of a node that is in no cell; deep checks follow. It is out of use meanwhile, and is
        replaced if they fail. 409 if it is in a cell, its machine has other nodes or cannot be rebooted, or it is being
        repaired."""
        return self.act_on_object(request, partial(repair_request, rung=Rung.REBOOT), "node_id")

    @extend_schema(request=CheckSerializer)
    @action(detail=True, methods=["post"])
    def check(self, request: Request, id: str) -> Response:
        """Orders a node to check its memory, disk and computation, and its links to `with_nodes`, which run the same
        checks. Results are in `checks` after some seconds. A failure counts as a fault. A node in a cell checks only
        memory and disk. 409 if a node is not ready, or if links are to be checked and a node is in a cell."""
        return self.act_on_object(request, node_checks_request, "node_id", CheckSerializer)


@csrf_exempt  # agents carry a token, never a cookie
@require_POST
def enrol(request: HttpRequest) -> JsonResponse:
    """`POST /agents/enrol`: an agent exchanges its join token for a credential.

    200 {"credential"}; 400: the body is no enrolment; 401: no token; 403: the token does not allow it; 429: too many
    requests from this network, with valid tokens or not."""
    network = client_network(request.META.get("REMOTE_ADDR", ""))
    rate = count_request("enrol", network, settings.API_ANONYMOUS_REQUESTS_PER_MIN)
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if rate is not None and rate.count > rate.limit and not is_ticket(token.strip()):
        message = f"more than {rate.limit} enrolments a minute from one network; try again in {rate.reset_s} s"
        return JsonResponse({"error": message}, status=429, headers={"Retry-After": str(rate.reset_s)})
    if scheme.lower() != "bearer" or not token:
        return JsonResponse({"error": "send the join token as 'Authorization: Bearer <token>'"}, status=401)
    try:
        body = decode_json(request.body) if len(request.body) <= MAX_ENROLMENT_BYTES else None
        kind, subject, nonce = (str(body[name]) for name in ("kind", "id", "nonce"))  # type: ignore[index]
    except (ValueError, KeyError, TypeError):
        message = 'the body must be {"kind": "node" or "ingress" or "machine", "id": "…", "nonce": "…"}'
        return JsonResponse({"error": message}, status=400)
    stated = {"token": token.strip(), "kind": kind, "subject": subject, "nonce": nonce}
    try:
        if kind == AgentKind.MACHINE:
            credential = machine_enrol(**stated, now=clock.now())
        else:
            certificate = getattr(request, "scope", {}).get(PEER_CERTIFICATE)
            credential = agent_enrol(**stated, certificate=certificate, now=clock.now())
    except (EnrolmentRefused, InvitationRefused) as refusal:
        if kind == AgentKind.MACHINE:
            join_refused(token=token.strip(), address=network, reason=str(refusal), now=clock.now())
        return JsonResponse({"error": str(refusal)}, status=403)
    return JsonResponse({"credential": credential})


ROUTES = (("nodes", NodeViewSet, "node"),)
