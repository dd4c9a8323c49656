"""Deployments over HTTP: create, read, change, scale and delete them. Checks types and ranges; services decide."""

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import Prefetch, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import Approval
from engine_agent.protocol.states import ServingClass
from fleet.autoscaling.models import RoleState
from fleet.autoscaling.planning.policy import CELLS_MOST, InvalidScaling, cells_as_json, parse_cells
from fleet.autoscaling.planning.roles import RatioRule
from fleet.capacity.planning.pools import Market
from fleet.cells.selectors import cells_by_type, ready_cells_by_place
from fleet.chains.selectors import chain_view
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import (
    cells_stated,
    deployment_change,
    deployment_create,
    deployment_delete,
    deployment_scale_or_request,
)
from fleet.load.api import WithLoad
from fleet.load.selectors import deployment_subject
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.access import Role, require
from kernel.rest.serializers import (
    ColumnsSerializer,
    RecordSerializer,
    StrictSerializer,
    actor_of,
    body_of,
    column_field,
)
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone

NAME = r"^[A-Za-z0-9][-A-Za-z0-9_]*\Z"


CELLS_SCHEMA = {
    "oneOf": [
        {"type": "integer", "minimum": 0, "maximum": CELLS_MOST},
        {
            "type": "object",
            "properties": {end: {"type": "integer", "minimum": 1, "maximum": CELLS_MOST} for end in ("min", "max")},
            "required": ["min", "max"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                role: {"type": "integer", "minimum": 0, "maximum": CELLS_MOST}
                for role in ("prefill", "decode", "mixed")
            },
            "required": ["prefill", "decode"],
            "additionalProperties": False,
        },
    ]
}


@extend_schema_field(CELLS_SCHEMA)
class CellsField(serializers.Field[Any, Any, Any, Any]):
    """A number of cells, a range as `{"min": 2, "max": 8}`, or cells by role as `{"prefill": 1, "decode": 3}`."""

    number = serializers.IntegerField(
        min_value=0,
        max_value=CELLS_MOST,
        error_messages={
            "invalid": "A valid integer is required, or an object with min and max, or one with prefill and decode."
        },
    )

    def to_internal_value(self, data: Any) -> int | dict[str, int]:
        if not isinstance(data, Mapping):
            return int(self.number.run_validation(data))
        try:
            return cells_as_json(parse_cells(data, "cells"))
        except InvalidScaling as wrong:
            raise serializers.ValidationError(str(wrong), "range") from None


def _by_type_field() -> serializers.DictField:
    return serializers.DictField(
        child=serializers.DictField(child=serializers.IntegerField(min_value=0, max_value=CELLS_MOST)),
        required=False,
        help_text="Region -> instance type -> target cells on it. The planner places the rest. In a change, other "
        "regions stay unchanged, and an empty object lets the planner place all cells of a region.",
    )


class WantedCellsSerializer(StrictSerializer):
    """Target number of cells in a region, or the range for the autoscaler."""

    region = serializers.CharField(max_length=64)
    cells = CellsField(
        help_text="A number, which ends a range and roles; or `min` and `max`; or `prefill` and `decode`, with "
        "optional `mixed`."
    )


def _check_unique_regions(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [place["region"] for place in wanted]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise serializers.ValidationError(f"repeated regions: {', '.join(repeated)}", "unique")
    return wanted


class ScaleSerializer(StrictSerializer):
    """Regions that are not listed stay unchanged."""

    regions = serializers.ListField(child=WantedCellsSerializer(), min_length=1)
    by_type = _by_type_field()

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _check_unique_regions(wanted)


def _instance_types_field(**options: Any) -> serializers.Field[Any, Any, Any, Any]:
    child = serializers.CharField(max_length=64)
    return column_field(Deployment._meta.get_field("instance_types"), child=child, min_length=1, **options)


class _Columns(ColumnsSerializer):
    markets = column_field(
        Deployment._meta.get_field("markets"), child=serializers.CharField(max_length=16), max_length=len(Market)
    )
    by_type = _by_type_field()


class ChangeDeploymentSerializer(_Columns):
    """Missing fields stay unchanged. A rollout changes the model version."""

    regions = serializers.ListField(
        child=WantedCellsSerializer(), min_length=1, required=False, help_text="Other regions stay unchanged."
    )
    instance_types = _instance_types_field(required=False)

    class Meta:
        model = Deployment
        columns = Deployment.SETTABLE
        examples = {"regions": [{"region": "us-west-2", "cells": 3}]}

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _check_unique_regions(wanted)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if not attrs:
            allowed = ", ".join(self.fields)
            message = f"changes nothing; set one of: {allowed}"
            raise serializers.ValidationError({"regions": serializers.ErrorDetail(message, "required")})
        return attrs


class CreateDeploymentSerializer(_Columns):
    name = serializers.RegexField(NAME, max_length=96, help_text="Letters, digits, `-` and `_`; it cannot be changed.")
    model_version = serializers.CharField(max_length=170, help_text="`model@version`")
    instance_types = _instance_types_field()
    regions = serializers.ListField(child=WantedCellsSerializer(), min_length=1)
    allow_unreleased = serializers.BooleanField(
        required=False, default=False, help_text="Accept a validated version that is not released."
    )

    class Meta:
        model = Deployment
        columns = Deployment.SETTABLE
        examples = {"update_policy": {"canary_bake_s": 60.0}}

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _check_unique_regions(wanted)


SHARED_WITH_OTHERS = frozenset({"team", "priority", "preemptible", "preempts", "chain"})
"""These affect other deployments, so a grant for a single deployment does not suffice."""


class CellRangeSerializer(serializers.Serializer[Any]):
    min = serializers.IntegerField()
    max = serializers.IntegerField()


class CellPoolsSerializer(serializers.Serializer[Any]):
    prefill = serializers.IntegerField()
    decode = serializers.IntegerField()
    mixed = serializers.IntegerField(required=False, help_text="Default: none.")


class RolePlanSerializer(serializers.Serializer[RoleState]):
    """The latest plan of roles. The cells follow it only if it acts."""

    prefill = serializers.IntegerField()
    decode = serializers.IntegerField()
    mixed = serializers.IntegerField()
    acting = serializers.BooleanField(help_text="Whether the cells follow the plan.")
    carries = serializers.FloatField(allow_null=True, help_text="Requests per second within limits; null: unknown.")
    mixed_carries = serializers.FloatField(allow_null=True, help_text="The same with mixed cells alone.")
    from_tokens = serializers.IntegerField(
        allow_null=True, help_text="Uncached tokens from which a prompt is handed over; null: 512."
    )
    rule = serializers.ChoiceField(choices=choices(RatioRule))
    reason = serializers.CharField()
    looked_at = serializers.DateTimeField()


class PlaceSerializer(serializers.Serializer[Any]):
    region = serializers.CharField()
    cells = serializers.IntegerField(help_text="Target number of cells.")
    range = CellRangeSerializer(allow_null=True, help_text="Range for the autoscaler; null: only users set the number.")
    pools = CellPoolsSerializer(allow_null=True, help_text="Cells per role, stated or planned; null: all are mixed.")
    role_plan = RolePlanSerializer(allow_null=True, help_text="Null: no plan, or not yet.")
    by_type = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Target cells per instance type; the planner places the rest.",
    )
    types = serializers.DictField(child=serializers.IntegerField(), help_text="Current cells per instance type.")
    ready = serializers.IntegerField(help_text="Ready cells.")
    granted = serializers.IntegerField(allow_null=True, help_text="Cells allowed while machines are scarce; null: all.")
    grant_reason = serializers.CharField(help_text="Why it is not allowed more; empty: it is allowed all.")

    class Meta:
        examples = {
            "types": {"trn1.32xlarge": 2, "inf2.48xlarge": 1},
            "grant_reason": "team search has 4 of 4 trn1.32xlarge and borrows 2",
        }


class DeploymentSerializer(RecordSerializer[Deployment]):
    # Context: `ready`, (deployment, region) -> ready cells; `types`, (deployment, region) -> cells per type.
    model_version = serializers.CharField(source="model_version.reference", help_text="`model@version`")
    regions = serializers.SerializerMethodField(help_text="Sorted by name.")

    class Meta:
        model = Deployment
        fields = ["name", "model_version", *Deployment.SETTABLE, "regions", "created_at"]
        examples = {"slo": {"ttft_ms": 1500.0}}

    @extend_schema_field(PlaceSerializer(many=True))
    def get_regions(self, deployment: Deployment) -> list[dict[str, Any]]:
        ready: dict[tuple[str, str], int] = self.context["ready"]
        types: dict[tuple[str, str], dict[str, int]] = self.context["types"]
        return [
            {
                "region": place.region_id,
                "cells": place.cells,
                "range": cells_as_json(place.range) if place.range else None,
                "pools": cells_as_json(place.pools) if place.pools else None,
                "role_plan": _role_plan(place),
                "by_type": place.by_type,
                "types": types.get((deployment.name, place.region_id), {}),
                "ready": ready.get((deployment.name, place.region_id), 0),
                "granted": place.cells_granted,
                "grant_reason": place.grant_reason if place.cells_granted is not None else "",
            }
            for place in deployment.regions.all()
        ]


def _role_plan(place: DeploymentRegion) -> dict[str, Any] | None:
    state: RoleState | None = getattr(place, "role_state", None)
    return None if state is None else RolePlanSerializer(state).data


class ChainPartSerializer(serializers.Serializer[Any]):
    name = serializers.CharField(help_text="`planner`, `application` between both, `deployment` or `sum`.")
    p50_ms = serializers.FloatField()
    p95_ms = serializers.FloatField()
    p99_ms = serializers.FloatField()
    percent = serializers.FloatField(help_text="Its mean part of the sum.")

    class Meta:
        examples = {"name": "planner", "p50_ms": 180.0, "p95_ms": 260.0, "p99_ms": 290.0, "percent": 22.0}


class ChainedRequestSerializer(serializers.Serializer[Any]):
    trace = serializers.CharField(source="request.trace")
    request = serializers.CharField(source="request.request", help_text="`X-Request-Id` of the deployment's answer.")
    planner_request = serializers.CharField(source="planner.request")
    at = serializers.DateTimeField(source="request.at")
    planner_ms = serializers.FloatField(help_text="From the planner's request to the end of its answer.")
    between_ms = serializers.FloatField(help_text="Of the application, by two clocks.")
    own_ms = serializers.FloatField(help_text="From the deployment's request to its first token.")
    sum_ms = serializers.FloatField()

    class Meta:
        examples = {"trace": "4bf92f3577b34da6a3ce929d0e0e4736", "planner_ms": 180.0, "sum_ms": 920.0}


class ChainFiguresSerializer(serializers.Serializer[Any]):
    count = serializers.IntegerField(help_text="Sampled chains of the last hour.")
    parts = ChainPartSerializer(many=True)
    late_percent = serializers.FloatField(allow_null=True, help_text="Sums over the objective; null without a chain.")
    planner_late_percent = serializers.FloatField(
        allow_null=True, help_text="Planners over their part; null if that is not stated."
    )
    slowest = ChainedRequestSerializer(many=True)


class ChainBurnSerializer(serializers.Serializer[Any]):
    rates = serializers.DictField(
        child=serializers.FloatField(allow_null=True), help_text="Window in seconds -> burn rate; null: no sample."
    )
    tone = serializers.ChoiceField(choices=choices(Tone))
    reason = serializers.CharField()


class ChainViewSerializer(serializers.Serializer[Any]):
    """A chain: its objective, what its parts took, and the burn of its budget."""

    deployment = serializers.CharField()
    plans = serializers.ListField(child=serializers.CharField(), help_text="Deployments whose requests it plans.")
    planner = serializers.CharField(source="chain.planner", allow_null=True, help_text="Null: it has none.")
    ttft_ms = serializers.FloatField(source="chain.ttft_ms", allow_null=True)
    ttft_share = serializers.FloatField(source="chain.ttft_share", allow_null=True)
    planner_ms = serializers.FloatField(source="chain.planner_ms", allow_null=True)
    figures = ChainFiguresSerializer(allow_null=True)
    burn = ChainBurnSerializer(allow_null=True)


class DeploymentFilter(filters.FilterSet):
    serving_class = filters.ChoiceFilter(choices=choices(ServingClass))
    region = filters.CharFilter(field_name="regions__region_id", help_text="Deployments in this region.")
    model = filters.CharFilter(field_name="model_version__model_id")
    instance_type = filters.CharFilter(method="on_type", help_text="Deployments that list this type.")
    team = filters.CharFilter()

    def on_type(self, rows: QuerySet[Deployment], name: str, value: str) -> QuerySet[Deployment]:
        return rows.filter(instance_types__contains=[value])


class DeploymentViewSet(WithLoad, ReadOnlyModelViewSet[Deployment]):
    """The model version that serves, its regions and its cells."""

    serializer_class = DeploymentSerializer
    filterset_class = DeploymentFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "serving_class", "created_at", "instance_types")
    watch_kind = "deployment"
    measured = frozenset({"ready", "types"})
    needs_if_match = frozenset({"destroy"})
    aliases = ("deploy", "dep")
    columns = (
        "NAME, VERSION=model_version, CLASS=serving_class, TYPES=instance_types, "
        "READY=regions:{region} {ready}/{cells}, AGE=created_at:age"
    )

    def deployment_of(self, deployment: Deployment) -> str:
        return deployment.name

    def get_queryset(self) -> QuerySet[Deployment]:
        regions = DeploymentRegion.objects.select_related("role_state").order_by("region_id")
        return Deployment.objects.select_related("model_version").prefetch_related(
            Prefetch("regions", queryset=regions)
        )

    def load_subject(self, row: Deployment) -> str:
        return deployment_subject(row.name)

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "ready": ready_cells_by_place(), "types": cells_by_type()}

    @extend_schema(request=CreateDeploymentSerializer)
    def create(self, request: Request) -> Response:
        """Creates a deployment of a model version. Its cells are placed on spares or on launched nodes. 409 if the name
        is taken."""
        columns = body_of(request, CreateDeploymentSerializer)
        cells = cells_stated(columns.pop("regions"))
        deployment = deployment_create(cells=cells, actor=actor_of(request), now=clock.now(), **columns)
        return Response(self.get_serializer(self.get_queryset().get(pk=deployment.pk)).data)

    @extend_schema(request=ChangeDeploymentSerializer, responses={200: DeploymentSerializer, 202: ApprovalSerializer})
    def partial_update(self, request: Request, name: str) -> Response:
        """Changes the given fields and the target cells of the listed regions. New cells are placed on spares or
        launched nodes; surplus cells are drained first. 202 with a request if this empties a region and evacuations
        need approval; all other changes are applied. Team, priority and preemption affect other deployments, so a grant
        for this deployment alone does not suffice."""
        deployment = self.get_object()
        columns, actor, now = body_of(request, ChangeDeploymentSerializer), actor_of(request), clock.now()
        places, done = columns.pop("regions", []), None
        if SHARED_WITH_OTHERS & set(columns):
            require(request, Role.OPERATOR)
        with transaction.atomic():
            if columns:
                deployment_change(name=deployment.name, actor=actor, now=now, **columns)
            if places:
                done = deployment_scale_or_request(
                    name=deployment.name, cells=cells_stated(places), actor=actor, now=now
                )
        if isinstance(done, Approval):
            return waiting(done)
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(responses=ChainViewSerializer, filters=False)
    @action(detail=True, url_path="chain", pagination_class=None)
    def chain_figures(self, request: Request, name: str) -> Response:
        """What the chain with its planner took in the last hour, by sampled requests that have the same trace, and the
        burn of its budget."""
        return Response(ChainViewSerializer(chain_view(self.get_object(), clock.now())).data)

    def destroy(self, request: Request, name: str) -> Response:
        """Deletes a deployment, its ended rollouts and its traffic settings, and returns it. 409 while it has target
        cells, live cells or an active rollout: scale it to 0 first."""
        return self.remove_object(request, deployment_delete, "name")


ROUTES = (("deployments", DeploymentViewSet, "deployment"),)
