"""Cells over HTTP: read them, drain or restart one, and read the logs of nodes; also the list filter shared with nodes.
Parses and renders; services decide."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, ClassVar

from django.core.validators import RegexValidator
from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
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
from kernel.rest.serializers import StrictSerializer, WhySerializer, validated
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone

ALL = "all"


class EndedHidden(filters.FilterSet):
    """Leaves out ended objects, which would soon outnumber the rest, unless `state` or `include=all` selects them."""

    ended: ClassVar[str]

    include = filters.ChoiceFilter(choices=[(ALL, "All")], method="keep", help_text="`all`: includes ended ones.")

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
        child=serializers.CharField(), help_text="Oldest first, at most 200. Likely secrets are removed."
    )

    class Meta:
        examples = {"name": "engine"}


class NodeLinesSerializer(serializers.Serializer[NodeLines]):
    node = serializers.CharField()
    rank = serializers.IntegerField(help_text="0 is the leader.")
    role = serializers.ChoiceField(choices=choices(MemberRole))
    said_at = serializers.DateTimeField(allow_null=True, help_text="null: its agent has sent none yet.")
    is_of_cell = serializers.BooleanField(help_text="Whether the lines belong to this generation.")
    logs = LogSerializer(many=True)


class LogsSerializer(serializers.Serializer[Any]):
    """The first response may be empty; read again after two seconds. Agents send lines for a minute after the last
    read."""

    lines = serializers.ListField(
        child=serializers.CharField(), help_text="Lines of the requested log, from the first node that has it."
    )
    nodes = NodeLinesSerializer(many=True, help_text="All logs of all nodes, by rank.")


class LogOptionsSerializer(StrictSerializer):
    # Any, because the base class has an attribute of this name.
    source: Any = serializers.ChoiceField(choices=[(name, name) for name in SOURCES], default="engine")
    lines = serializers.IntegerField(
        min_value=1, max_value=1000, default=LINES_DEFAULT, help_text="Maximum lines per log."
    )


def logs_read(request: Request, read: Callable[[], tuple[NodeLines, ...]], nodes: Iterable[str]) -> Response:
    """Requests the logs of these nodes, and responds with the lines received so far."""
    options = validated(LogOptionsSerializer, request.query_params)
    node_logs_request(nodes=nodes, now=clock.now())
    return Response(LogsSerializer(_logs_body(read(), options["source"], options["lines"])).data)


def _logs_body(nodes: tuple[NodeLines, ...], source: str, limit: int) -> dict[str, Any]:
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
    rank = serializers.IntegerField(help_text="0 is the leader.")
    role = serializers.ChoiceField(choices=choices(MemberRole))
    state = serializers.ChoiceField(choices=choices(NodeState), source="node.state")

    class Meta:
        model = CellMember
        fields = ["id", "rank", "role", "state"]
        examples = {"id": "n-0a1b2c3d"}


class BatchLoadSerializer(serializers.Serializer[Any]):
    """A cell's batch requests next to its real-time ones. Latencies are 95th percentiles; null: unknown."""

    running = serializers.IntegerField(help_text="Requests in the engine.")
    waiting = serializers.IntegerField(help_text="Requests in the cell that wait for an earlier prompt.")
    window = serializers.IntegerField(
        help_text="Batch requests allowed in the engine, from the latency of real-time requests."
    )
    is_alone = serializers.BooleanField(help_text="No recent real-time requests, so the window does not apply.")
    is_over_budget = serializers.BooleanField(help_text="Real-time latency exceeded its budget, so the window shrank.")
    baseline_ttft_ms = serializers.FloatField(allow_null=True, help_text="Real-time requests without batch requests.")
    baseline_itl_ms = serializers.FloatField(allow_null=True)
    recent_ttft_ms = serializers.FloatField(allow_null=True, help_text="Real-time requests during batch requests.")
    recent_itl_ms = serializers.FloatField(allow_null=True)


class CacheLoadSerializer(serializers.Serializer[Any]):
    """The engine's prefix cache, and how well requests are routed by it. Totals are prompt tokens since the cell's
    proxy started."""

    is_known = serializers.BooleanField(help_text="The engine reports its cache. Otherwise requests use sticky cells.")
    blocks = serializers.IntegerField(help_text="Blocks in the engine.")
    block_tokens = serializers.IntegerField(help_text="Tokens per block.")
    prefixes = serializers.IntegerField(help_text="Prefixes that ingresses know to be cached here.")
    asked_tokens_total = serializers.IntegerField(help_text="Tokens of requests routed by these prefixes.")
    predicted_tokens_total = serializers.IntegerField(help_text="Of those, tokens expected in the cache.")
    found_tokens_total = serializers.IntegerField(help_text="Of those, tokens found in the cache.")
    other_tokens_total = serializers.IntegerField(help_text="Tokens of requests routed by another rule.")
    other_found_tokens_total = serializers.IntegerField(help_text="Of those, tokens found in the cache.")


class HandoverLoadSerializer(serializers.Serializer[Any]):
    """Prompts that prefill cells computed for decode cells since the proxy started; times cover the last 30 s."""

    handovers_total = serializers.IntegerField(
        help_text="Requests of a decode cell whose prompts a prefill cell computed."
    )
    in_flight = serializers.IntegerField(help_text="Handovers that wait for their first token.")
    alone = serializers.DictField(
        child=serializers.IntegerField(), help_text="Reason -> requests computed without a handover by rule."
    )
    fallbacks = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Reason -> requests computed without a handover because a prefill cell failed.",
    )
    prefill_p50_ms = serializers.FloatField(
        allow_null=True, help_text="Time until a prefill cell had computed a prompt."
    )
    prefill_p99_ms = serializers.FloatField(allow_null=True)
    transfer_p50_ms = serializers.FloatField(
        allow_null=True, help_text="Time from there to the first byte of the answer."
    )
    transfer_p99_ms = serializers.FloatField(allow_null=True)
    prefills_total = serializers.IntegerField(help_text="Prompts that a prefill cell computed.")
    prefill_tokens_total = serializers.IntegerField(help_text="Tokens of these prompts.")

    class Meta:
        examples = {"alone": {"short_prompt": 12}, "fallbacks": {}}


class EngineLoadSerializer(serializers.Serializer[Any]):
    """The engine by its own metrics."""

    running = serializers.IntegerField(help_text="Sequences in its batch.")
    waiting = serializers.IntegerField(help_text="Requests in its queue.")
    kv_percent = serializers.FloatField(allow_null=True, help_text="KV-cache use; null: not reported.")
    preemptions_total = serializers.IntegerField(
        help_text="Sequences that left its batch before their end, since its start."
    )


class SpeculationLoadSerializer(serializers.Serializer[Any]):
    """Speculation over the last hour, from the engine's counters."""

    covered_s = serializers.FloatField(help_text="Seconds covered, at most about an hour.")
    drafts = serializers.IntegerField(help_text="One per sequence and step with guesses.")
    guessed_tokens = serializers.IntegerField(help_text="Tokens in these drafts.")
    accepted_tokens = serializers.IntegerField(help_text="Of those, tokens that the model accepted.")


class LoadSerializer(serializers.Serializer[CellLoad]):
    """Rates and percentiles cover the last 30 s."""

    in_flight = serializers.IntegerField(help_text="Requests that the engine is processing.")
    queued = serializers.IntegerField(help_text="Requests waiting in the engine.")
    tokens_per_s = serializers.FloatField(help_text="Output tokens.")
    ttft_p50_ms = serializers.FloatField(allow_null=True, help_text="Time to first token; null without samples.")
    ttft_p99_ms = serializers.FloatField(allow_null=True)
    itl_p50_ms = serializers.FloatField(allow_null=True, help_text="Time between tokens; null without samples.")
    itl_p99_ms = serializers.FloatField(allow_null=True)
    batch = BatchLoadSerializer(allow_null=True, help_text="Batch requests; null: no report, or an older agent.")
    cache = CacheLoadSerializer(allow_null=True, help_text="Prefix cache; null: no report, or an older agent.")
    handovers = HandoverLoadSerializer(allow_null=True, help_text="Null: no report, or a mixed cell.")
    speculation = SpeculationLoadSerializer(allow_null=True, help_text="Null: no report, or no speculation.")
    engine = EngineLoadSerializer(allow_null=True, help_text="Null: no report, or an engine without these metrics.")
    reported_at = serializers.DateTimeField(
        allow_null=True, help_text="When the leader's agent reported it; null: no report of this generation yet."
    )


class StackGroupSerializer(serializers.Serializer[Any]):
    """Nodes with the same software."""

    digest = serializers.CharField(help_text="Digest of all fields relevant for the cell's engine.")
    nodes = serializers.ListField(child=serializers.CharField(), help_text="By rank.")


class DifferingFieldSerializer(serializers.Serializer[Any]):
    """A field in which nodes differ, with each node's value."""

    field = serializers.CharField()
    values = serializers.DictField(
        child=serializers.CharField(allow_null=True), help_text="Node -> value; null where the node has no such field."
    )

    class Meta:
        examples = {"field": "neuron_driver", "values": {"n-0a1b2c3d": "2.27.4.0", "n-4e5f6a7b": "2.26.5.0"}}


class FingerprintsSerializer(serializers.Serializer[StackComparison]):
    """Software of the nodes. All members of a cell must be in one group. Nodes without a report are left out."""

    groups = StackGroupSerializer(many=True, help_text="The leader's group first.")
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
    instance_type = serializers.CharField(source="instance_type_id", help_text="Type of all its nodes.")
    model_version = serializers.CharField(source="model_version.reference", help_text="`model@version`")
    serving_class = serializers.ChoiceField(choices=choices(ServingClass), source="deployment.serving_class")
    role = serializers.ChoiceField(
        choices=choices(CellRole), help_text="Prefill cells compute prompts for decode cells."
    )
    tone = serializers.ChoiceField(choices=choices(Tone))
    generation = serializers.IntegerField(help_text="Increases with every start of the engine.")
    restarts = serializers.IntegerField(help_text="Starts since it was last ready.")
    nodes = MemberSerializer(source="members", many=True, help_text="By rank.")
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
        load = cell_load(cell)  # plain values: serializers for a hundred cells take longer than the query
        parts = {name: getattr(load, name) for name in ("batch", "cache", "handovers", "speculation", "engine")}
        plain = {name: None if part is None else structs.asdict(part) for name, part in parts.items()}
        return {field.name: getattr(load, field.name) for field in fields(load)} | plain


class CellFilter(EndedHidden):
    ended = CellState.STOPPED.value

    state = filters.MultipleChoiceFilter(
        choices=choices(CellState), distinct=False, help_text="May be repeated. Default: all but stopped cells."
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

    def of_version(self, queryset: QuerySet[Cell], name: str, value: str) -> QuerySet[Cell]:
        model, _, version = value.partition("@")
        return queryset.filter(model_version__model_id=model, model_version__version=version)


class CellViewSet(WithLoad, ReadOnlyModelViewSet[Cell]):
    """Replicas of a model, each on one or several nodes."""

    serializer_class = CellSerializer
    filterset_class = CellFilter
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

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def drain(self, request: Request, id: str) -> Response:
        """Drains a ready cell. It gets no new requests, finishes those in flight within its deployment's deadline, and
        stops. A new cell takes its place. 409 if it is not ready."""
        return self.act_on_object(request, cell_drain, "cell_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def restart(self, request: Request, id: str) -> Response:
        """Restarts a ready or failed cell with a new generation. Requests in flight are cut off; drain it to let them
        finish. 409 in any other state."""
        return self.act_on_object(request, cell_restart, "cell_id")

    @extend_schema(parameters=[LogOptionsSerializer], responses={200: LogsSerializer})
    @action(detail=True, methods=["get"], filter_backends=[])
    def logs(self, request: Request, id: str) -> Response:
        """The last lines of the logs of the cell's nodes. Their agents send lines while a user reads them."""
        cell = self.get_object()
        nodes = [member.node_id for member in cell.members.all()]
        return logs_read(request, lambda: cell_log_lines(cell.id), nodes)


ROUTES = (("cells", CellViewSet, "cell"),)
