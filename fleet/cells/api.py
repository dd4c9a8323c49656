"""What filters of the fleet's lists have in common.

The last lines of the logs of nodes over HTTP. Reading them makes the agents send them; nothing else.

Cells over HTTP: read them, drain one, start one again. Decides nothing; services do.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, ClassVar

from django.core.validators import RegexValidator
from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import (
    extend_schema,
    extend_schema_field,
)
from msgspec import structs
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.states import CellRole, MemberRole, ServingClass
from fleet.cells.models import Cell, CellMember
from fleet.cells.selectors import cell_stacks, cells_described
from fleet.cells.services import cell_drain, cell_restart
from fleet.load.api import WithLoad
from fleet.load.selectors import CellLoad, cell_load, cell_subject
from fleet.nodes.planner import StackComparison
from fleet.nodes.selectors import NodeLines, cell_log_lines
from fleet.nodes.services.reports import node_logs_request
from fleet.reconcile.planning.states import CellState, NodeState, choices
from kernel import clock
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone

ALL = "all"


class EndedHidden(filters.FilterSet):
    """Leaves out what has ended, which would soon outnumber the rest, unless `state` or `include=all` selects it."""

    ended: ClassVar[str]

    include = filters.ChoiceFilter(
        choices=[(ALL, "All")], method="keep", help_text="`all`: with those that have ended, which are left out else."
    )

    def keep(self, queryset: QuerySet[Any], name: str, value: str) -> QuerySet[Any]:
        return queryset

    def filter_queryset(self, queryset: QuerySet[Any]) -> QuerySet[Any]:
        options = self.form.cleaned_data
        chosen: QuerySet[Any] = super().filter_queryset(queryset)
        return chosen if options["state"] or options["include"] else chosen.exclude(state=self.ended)


SOURCES = ("engine", "proxy", "agent")
LINES_DEFAULT = 200


class LogSerializer(serializers.Serializer[Any]):
    name = serializers.CharField(help_text="`agent`, `engine` or `proxy`.")
    lines = serializers.ListField(
        child=serializers.CharField(), help_text="Oldest first, at most 200; what looks like a secret is taken out."
    )

    class Meta:
        examples = {"name": "engine"}


class NodeLinesSerializer(serializers.Serializer[NodeLines]):
    node = serializers.CharField()
    rank = serializers.IntegerField(help_text="0 leads.")
    role = serializers.ChoiceField(choices=choices(MemberRole))
    said_at = serializers.DateTimeField(allow_null=True, help_text="null: its agent has not sent any yet.")
    is_of_cell = serializers.BooleanField(
        help_text="Whether they are of this generation, and not of what ran there before."
    )
    logs = LogSerializer(many=True)


class LogsSerializer(serializers.Serializer[Any]):
    """The first response may be empty: read again after two seconds. Agents go on for a minute after the last read."""

    lines = serializers.ListField(
        child=serializers.CharField(), help_text="Of the requested log, of the first node that has one."
    )
    nodes = NodeLinesSerializer(many=True, help_text="All logs of all nodes, in the order of ranks.")


class LogOptionsSerializer(StrictSerializer):
    """Which log, and how many lines."""

    # The base class has an attribute of this name, which says where a value is taken from.
    source: Any = serializers.ChoiceField(choices=[(name, name) for name in SOURCES], default="engine")
    lines = serializers.IntegerField(
        min_value=1, max_value=1000, default=LINES_DEFAULT, help_text="Of each log, at most."
    )


def logs_read(request: Request, read: Callable[[], tuple[NodeLines, ...]], nodes: Iterable[str]) -> Response:
    """Request these nodes' lines, and respond with those that arrived so far."""
    payload = LogOptionsSerializer(data=request.query_params)
    payload.is_valid(raise_exception=True)
    node_logs_request(nodes=nodes, now=clock.now())
    return Response(
        LogsSerializer(_body(read(), payload.validated_data["source"], payload.validated_data["lines"])).data
    )


def _body(nodes: tuple[NodeLines, ...], source: str, limit: int) -> dict[str, Any]:
    rows = [
        {
            "node": node.node,
            "rank": node.rank,
            "role": node.role,
            "said_at": node.said_at,
            "is_of_cell": node.is_of_cell,
            "logs": [{"name": name, "lines": lines[-limit:]} for name, lines in sorted(node.logs.items())],
        }
        for node in nodes
    ]
    shown = next((node.logs[source] for node in nodes if source in node.logs), [])
    return {"lines": shown[-limit:], "nodes": rows}


REFERENCE = r"^[^@]+@.+$"


class MemberSerializer(serializers.ModelSerializer[CellMember]):
    id = serializers.CharField(source="node_id", help_text="The node.")
    rank = serializers.IntegerField(help_text="0 leads.")
    role = serializers.ChoiceField(choices=choices(MemberRole))
    state = serializers.ChoiceField(choices=choices(NodeState), source="node.state")

    class Meta:
        model = CellMember
        fields = ["id", "rank", "role", "state"]
        examples = {"id": "n-0a1b2c3d"}


class BatchLoadSerializer(serializers.Serializer[Any]):
    """A cell's batch requests beside its real-time ones. Latencies are 95th percentiles; null: not known."""

    running = serializers.IntegerField(help_text="In the engine.")
    waiting = serializers.IntegerField(help_text="In the cell, for the prompt before them to be read.")
    window = serializers.IntegerField(help_text="So many may be in the engine, by what real-time requests feel.")
    is_alone = serializers.BooleanField(help_text="Nobody more urgent came of late: the window is not in force.")
    is_over_budget = serializers.BooleanField(help_text="Real-time requests felt too much of it: the window shrank.")
    baseline_ttft_ms = serializers.FloatField(allow_null=True, help_text="Of real-time requests without batch work.")
    baseline_itl_ms = serializers.FloatField(allow_null=True)
    recent_ttft_ms = serializers.FloatField(allow_null=True, help_text="Of real-time requests beside batch work.")
    recent_itl_ms = serializers.FloatField(allow_null=True)


class CacheLoadSerializer(serializers.Serializer[Any]):
    """What a cell's engine says of its prefix cache, and how well requests are sent by it. Totals are in tokens of
    prompts, since the cell's proxy started."""

    is_known = serializers.BooleanField(help_text="The engine says what it has; else requests go by sticky cells.")
    blocks = serializers.IntegerField(help_text="That the engine has.")
    block_tokens = serializers.IntegerField(help_text="In each.")
    prefixes = serializers.IntegerField(help_text="Beginnings of requests that ingresses know to be here.")
    asked_tokens_total = serializers.IntegerField(help_text="Of requests that were sent here by this list.")
    predicted_tokens_total = serializers.IntegerField(help_text="Of those, what was to be found here.")
    found_tokens_total = serializers.IntegerField(help_text="Of those, what the engine found.")
    other_tokens_total = serializers.IntegerField(help_text="Of requests that came by another rule.")
    other_found_tokens_total = serializers.IntegerField(help_text="Of those, what the engine found.")


class HandoverLoadSerializer(serializers.Serializer[Any]):
    """Prompts that prefill cells read for decode cells, since its proxy started; times are of the last 30 s."""

    handovers_total = serializers.IntegerField(help_text="Requests of a decode cell whose prompts others read.")
    in_flight = serializers.IntegerField(help_text="Under way until their first token.")
    alone = serializers.DictField(
        child=serializers.IntegerField(), help_text="Reason -> requests that it did alone by its rules."
    )
    fallbacks = serializers.DictField(
        child=serializers.IntegerField(), help_text="Reason -> requests that it did alone as a prefill cell failed it."
    )
    prefill_p50_ms = serializers.FloatField(allow_null=True, help_text="Until a prefill cell had read a prompt.")
    prefill_p99_ms = serializers.FloatField(allow_null=True)
    transfer_p50_ms = serializers.FloatField(allow_null=True, help_text="From there to the first byte of the answer.")
    transfer_p99_ms = serializers.FloatField(allow_null=True)
    prefills_total = serializers.IntegerField(help_text="Prompts that a prefill cell read.")
    prefill_tokens_total = serializers.IntegerField(help_text="Tokens in them.")

    class Meta:
        examples = {"alone": {"short_prompt": 12}, "fallbacks": {}}


class SpeculationLoadSerializer(serializers.Serializer[Any]):
    """What a cell's engine guessed over the last hour, by its own counters."""

    covered_s = serializers.FloatField(help_text="Seconds that were watched, some hour at most.")
    drafts = serializers.IntegerField(help_text="One for each sequence in each step that guessed.")
    guessed_tokens = serializers.IntegerField(help_text="In them.")
    accepted_tokens = serializers.IntegerField(help_text="Of those, what the model took.")


class LoadSerializer(serializers.Serializer[CellLoad]):
    """Rates and percentiles cover the last 30 s."""

    in_flight = serializers.IntegerField(help_text="Requests that the engine works on.")
    queued = serializers.IntegerField(help_text="Requests that wait in the engine.")
    tokens_per_s = serializers.FloatField(help_text="Output tokens.")
    ttft_p50_ms = serializers.FloatField(allow_null=True, help_text="Time to first token; null without samples.")
    ttft_p99_ms = serializers.FloatField(allow_null=True)
    itl_p50_ms = serializers.FloatField(allow_null=True, help_text="Between tokens; null without samples.")
    itl_p99_ms = serializers.FloatField(allow_null=True)
    batch = BatchLoadSerializer(allow_null=True, help_text="Batch requests; null: no report, or of an older agent.")
    cache = CacheLoadSerializer(allow_null=True, help_text="Its prefix cache; null: no report, or of an older agent.")
    handovers = HandoverLoadSerializer(allow_null=True, help_text="Null: no report, or a mixed cell.")
    speculation = SpeculationLoadSerializer(allow_null=True, help_text="Null: no report, or nothing was guessed.")
    reported_at = serializers.DateTimeField(
        allow_null=True, help_text="When the leader's agent reported it; null: no report of this generation yet."
    )


class StackGroupSerializer(serializers.Serializer[Any]):
    """Nodes that run the same software."""

    digest = serializers.CharField(help_text="Of all fields that count for the cell's engine.")
    nodes = serializers.ListField(child=serializers.CharField(), help_text="In the order of ranks.")


class DifferingFieldSerializer(serializers.Serializer[Any]):
    """One field in which nodes differ, with the value of each."""

    field = serializers.CharField()
    values = serializers.DictField(
        child=serializers.CharField(allow_null=True), help_text="Node -> value; null where the node has no such field."
    )

    class Meta:
        examples = {"field": "neuron_driver", "values": {"n-0a1b2c3d": "2.27.4.0", "n-4e5f6a7b": "2.26.5.0"}}


class FingerprintsSerializer(serializers.Serializer[StackComparison]):
    """What the nodes run. A cell forms only of one group; nodes that have not reported it yet are left out."""

    groups = StackGroupSerializer(many=True, help_text="That of the leader first.")
    differing = DifferingFieldSerializer(many=True, help_text="Fields in which the groups differ, by name.")

    def to_representation(self, instance: StackComparison) -> dict[str, Any]:
        groups = [{"digest": group.digest, "nodes": [r.node for r in group.ranks]} for group in instance.groups]
        nodes = [rank.node for rank in instance.ranks]
        differing = [
            {"field": difference.field, "values": dict(zip(nodes, difference.values, strict=True))}
            for difference in instance.differing
        ]
        return {"groups": groups, "differing": differing}


class CellSerializer(serializers.ModelSerializer[Cell]):
    deployment = serializers.CharField(source="deployment_id")
    region = serializers.CharField(source="region_id")
    instance_type = serializers.CharField(source="instance_type_id", help_text="Of all its nodes.")
    model_version = serializers.CharField(source="model_version.reference", help_text="`model@version`")
    serving_class = serializers.ChoiceField(choices=choices(ServingClass), source="deployment.serving_class")
    role = serializers.ChoiceField(
        choices=choices(CellRole), help_text="Prefill cells only read prompts for decode cells."
    )
    tone = serializers.ChoiceField(choices=choices(Tone))
    generation = serializers.IntegerField(help_text="Grows with every start of the engine.")
    restarts = serializers.IntegerField(help_text="Starts since it was last ready.")
    nodes = MemberSerializer(source="members", many=True, help_text="In the order of ranks.")
    fingerprints = serializers.SerializerMethodField()
    load = serializers.SerializerMethodField()

    class Meta:
        model = Cell
        fields = [
            "id", "deployment", "region", "instance_type", "model_version", "serving_class", "role", "state", "reason",
            "tone", "generation", "restarts", "nodes", "fingerprints", "load", "unrouted_at", "state_since",
            "created_at",
        ]  # fmt: skip
        examples = {"id": "sim-70b-us-east-1-1"}

    @extend_schema_field(FingerprintsSerializer)
    def get_fingerprints(self, cell: Cell) -> dict[str, Any]:
        return FingerprintsSerializer(cell_stacks(cell)).data

    @extend_schema_field(LoadSerializer)
    def get_load(self, cell: Cell) -> dict[str, Any]:
        load = cell_load(cell)  # plain values: a serializer for each of a hundred cells costs more than the query
        parts = {name: getattr(load, name) for name in ("batch", "cache", "handovers", "speculation")}
        plain = {name: None if part is None else structs.asdict(part) for name, part in parts.items()}
        return {field.name: getattr(load, field.name) for field in fields(load)} | plain


class CellFilter(EndedHidden):
    ended = CellState.STOPPED.value

    state = filters.MultipleChoiceFilter(
        choices=choices(CellState), distinct=False, help_text="May be repeated. Stopped cells are left out else."
    )
    region = filters.CharFilter(field_name="region_id")
    deployment = filters.CharFilter(field_name="deployment_id")
    serving_class = filters.ChoiceFilter(field_name="deployment__serving_class", choices=choices(ServingClass))
    model = filters.CharFilter(field_name="model_version__model_id")
    model_version = extend_schema_field({"type": "string", "pattern": REFERENCE, "description": "`model@version`"})(
        filters.CharFilter(method="of_version", validators=[RegexValidator(REFERENCE, "must read model@version")])
    )
    role = filters.ChoiceFilter(choices=choices(CellRole))
    node = filters.CharFilter(field_name="members__node_id", help_text="The cell that this node is in.")

    class Meta:
        model = Cell
        fields: list[str] = []

    def of_version(self, queryset: QuerySet[Cell], name: str, value: str) -> QuerySet[Cell]:
        model, _, version = value.partition("@")
        return queryset.filter(model_version__model_id=model, model_version__version=version)


class CellViewSet(WithLoad, ReadOnlyModelViewSet[Cell]):
    """Model replicas, each one deployable over one or several nodes."""

    serializer_class = CellSerializer
    filterset_class = CellFilter
    lookup_field = "id"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("id", "state", "generation", "restarts", "state_since", "created_at", "region", "deployment")
    watch_kind = "cell"
    measured = frozenset({"load", "fingerprints"})
    aliases = ("c",)
    columns = (
        "CELL=id, STATE, VERSION=model_version, REGION, NODES=nodes.id, BUSY=load.in_flight, QUEUED=load.queued, "
        "TOK/S=load.tokens_per_s, SINCE=state_since:age"
    )

    def deployment_of(self, cell: Cell) -> str:
        return cell.deployment_id

    def get_queryset(self) -> QuerySet[Cell]:
        return cells_described()

    def load_subject(self, row: Cell) -> str:
        return cell_subject(row.id)

    @extend_schema(operation_id="cells_drain", request=WhySerializer, responses={200: CellSerializer})
    @action(detail=True, methods=["post"])
    def drain(self, request: Request, id: str) -> Response:
        """Take a ready cell out of service. It takes no new requests, finishes those in flight or meets the drain
        deadline of its deployment, and stops; a new cell makes up for it. 409 if it is not ready."""
        return self._act(cell_drain, request, id)

    @extend_schema(operation_id="cells_restart", request=WhySerializer, responses={200: CellSerializer})
    @action(detail=True, methods=["post"])
    def restart(self, request: Request, id: str) -> Response:
        """Start a ready or failed cell again, whole, with a new generation. Requests in flight are cut: drain it
        instead if they matter. 409 in any other state."""
        return self._act(cell_restart, request, id)

    @extend_schema(
        operation_id="cells_logs",
        parameters=[LogOptionsSerializer],
        responses={200: LogsSerializer},
    )
    @action(detail=True, methods=["get"], filter_backends=[])
    def logs(self, request: Request, id: str) -> Response:
        """The last lines of the logs of the cell's nodes, as their agents send them while a user reads."""
        cell = self.get_object()
        nodes = [member.node_id for member in cell.members.all()]
        return logs_read(request, lambda: cell_log_lines(cell.id), nodes)

    def _act(self, service: Any, request: Request, cell_id: str) -> Response:
        cell = self.get_object()
        payload = WhySerializer(data=request.data)
        payload.is_valid(raise_exception=True)
        service(cell_id=cell.id, actor=actor_of(request), now=clock.now(), why=payload.validated_data["why"])
        return Response(self.get_serializer(self.get_object()).data)
