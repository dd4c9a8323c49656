"""Bodies of requests about deployments. Types and ranges are checked here; what values mean is for the services.

Deployments over HTTP: create, read, change, scale and delete them. Decides nothing; services do.
"""

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import Prefetch, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
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
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, StrictSerializer, actor_of, column_field
from kernel.rest.view_sets import ReadOnlyModelViewSet

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
    """A number of cells, a range of them as `{"min": 2, "max": 8}`, or cells by role as
    `{"prefill": 1, "decode": 3}`."""

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


def _by_type() -> serializers.DictField:
    return serializers.DictField(
        child=serializers.DictField(child=serializers.IntegerField(min_value=0, max_value=CELLS_MOST)),
        required=False,
        help_text="Region -> instance type -> how many of its cells should be on it; the rest is wherever is best. In "
        "a change, other regions stay as they are, and an empty object leaves all cells of a region to that.",
    )


class WantedCellsSerializer(StrictSerializer):
    """How many cells a region should have, or within which range the autoscaler sets their number."""

    region = serializers.CharField(max_length=64)
    cells = CellsField(
        help_text="A number, which ends a range and roles; `min` and `max`; or `prefill` and `decode`, and `mixed` "
        "where there are such cells."
    )


def _each_once(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [place["region"] for place in wanted]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise serializers.ValidationError(f"each region once; more than once here: {', '.join(twice)}", "unique")
    return wanted


class ScaleSerializer(StrictSerializer):
    """Regions that are not named stay as they are."""

    regions = serializers.ListField(child=WantedCellsSerializer(), min_length=1)
    by_type = _by_type()

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _each_once(wanted)


def _instance_types(**options: Any) -> serializers.ListField:
    child = serializers.CharField(max_length=64)
    return column_field(Deployment._meta.get_field("instance_types"), child=child, min_length=1, **options)


class _Columns(ColumnsSerializer):
    markets = column_field(
        Deployment._meta.get_field("markets"), child=serializers.CharField(max_length=16), max_length=len(Market)
    )
    by_type = _by_type()


class ChangeDeploymentSerializer(_Columns):
    """Whatever is left out stays as it is. Another model version comes by a rollout."""

    regions = serializers.ListField(
        child=WantedCellsSerializer(), min_length=1, required=False, help_text="Others stay as they are."
    )
    instance_types = _instance_types(required=False)

    class Meta:
        model = Deployment
        columns = Deployment.SETTABLE
        examples = {"regions": [{"region": "us-west-2", "cells": 3}]}

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _each_once(wanted)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if not attrs:
            allowed = ", ".join(self.fields)
            message = f"changes nothing; give one of: {allowed}"
            raise serializers.ValidationError({"regions": serializers.ErrorDetail(message, "required")})
        return attrs


class CreateDeploymentSerializer(_Columns):
    name = serializers.RegexField(NAME, max_length=96, help_text="Letters, digits, `-` and `_`; it never changes.")
    model_version = serializers.CharField(max_length=170, help_text="`model@version`")
    instance_types = _instance_types()
    regions = serializers.ListField(child=WantedCellsSerializer(), min_length=1)
    allow_unreleased = serializers.BooleanField(
        required=False, default=False, help_text="Take a validated version that is not released."
    )

    class Meta:
        model = Deployment
        columns = Deployment.SETTABLE
        examples = {"update_policy": {"canary_bake_s": 60.0}}

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _each_once(wanted)


SHARED_WITH_OTHERS = frozenset({"team", "priority", "preemptible", "preempts"})
"""Who may operate this deployment alone may not say whose machines it gets."""


class CellRangeSerializer(serializers.Serializer[Any]):
    min = serializers.IntegerField()
    max = serializers.IntegerField()


class CellPoolsSerializer(serializers.Serializer[Any]):
    prefill = serializers.IntegerField()
    decode = serializers.IntegerField()
    mixed = serializers.IntegerField(required=False, help_text="Left out: none.")


class RolePlanSerializer(serializers.Serializer[RoleState]):
    """What the planner of roles last wanted. It is so only where it acts."""

    prefill = serializers.IntegerField()
    decode = serializers.IntegerField()
    mixed = serializers.IntegerField()
    acting = serializers.BooleanField(help_text="The cells follow; else it is what they would be.")
    carries = serializers.FloatField(allow_null=True, help_text="Requests a second within both limits; null: unknown.")
    mixed_carries = serializers.FloatField(allow_null=True, help_text="The same with mixed cells alone.")
    from_tokens = serializers.IntegerField(
        allow_null=True, help_text="Uncached tokens from which a prompt is handed over; null: 512."
    )
    rule = serializers.ChoiceField(choices=choices(RatioRule))
    reason = serializers.CharField()
    looked_at = serializers.DateTimeField()


class PlaceSerializer(serializers.Serializer[Any]):
    region = serializers.CharField()
    cells = serializers.IntegerField(help_text="How many there should be.")
    range = CellRangeSerializer(
        allow_null=True, help_text="Within which the autoscaler may set that number; null: a person alone does."
    )
    pools = CellPoolsSerializer(
        allow_null=True, help_text="How many of them should have which role, stated or planned; null: all are mixed."
    )
    role_plan = RolePlanSerializer(allow_null=True, help_text="Null: its roles are not planned, or not yet.")
    by_type = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="How many of them should be on which instance type; the rest is wherever is best.",
    )
    types = serializers.DictField(
        child=serializers.IntegerField(), help_text="How many cells there are now on which instance type."
    )
    ready = serializers.IntegerField(help_text="How many serve now.")
    granted = serializers.IntegerField(
        allow_null=True, help_text="How many of them it may have while machines are short; null: all."
    )
    grant_reason = serializers.CharField(help_text="Why no more; empty: it may have all.")

    class Meta:
        examples = {
            "types": {"trn1.32xlarge": 2, "inf2.48xlarge": 1},
            "grant_reason": "team search has 4 of 4 trn1.32xlarge and borrows 2",
        }


class DeploymentSerializer(RecordSerializer[Deployment]):
    # The context holds, under `ready`, (deployment, region) -> number of ready cells; under `types`, of all by type.
    model_version = serializers.CharField(source="model_version.reference", help_text="`model@version`")
    regions = serializers.SerializerMethodField(help_text="In the order of names.")

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


class DeploymentFilter(filters.FilterSet):
    serving_class = filters.ChoiceFilter(choices=choices(ServingClass))
    region = filters.CharFilter(field_name="regions__region_id", help_text="Should serve in this region.")
    model = filters.CharFilter(field_name="model_version__model_id")
    instance_type = filters.CharFilter(method="on_type", help_text="Its cells may be on this one.")
    team = filters.CharFilter()

    class Meta:
        model = Deployment
        fields: list[str] = []

    def on_type(self, rows: QuerySet[Deployment], name: str, value: str) -> QuerySet[Deployment]:
        return rows.filter(instance_types__contains=[value])


class DeploymentViewSet(WithLoad, ReadOnlyModelViewSet[Deployment]):
    """Which model version serves, where, and with how many cells."""

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

    @extend_schema(
        operation_id="deployments_create", request=CreateDeploymentSerializer, responses={200: DeploymentSerializer}
    )
    def create(self, request: Request) -> Response:
        """Serve a model version in these regions. Its cells are placed on spares, or on nodes that are launched. 409 if
        the name is taken."""
        payload = CreateDeploymentSerializer(data=request.data)
        payload.is_valid(raise_exception=True)
        columns = dict(payload.validated_data)
        cells = cells_stated(columns.pop("regions"))
        deployment = deployment_create(cells=cells, actor=actor_of(request), now=clock.now(), **columns)
        return Response(self.get_serializer(self.get_queryset().get(pk=deployment.pk)).data)

    @extend_schema(
        operation_id="deployments_change",
        request=ChangeDeploymentSerializer,
        responses={200: DeploymentSerializer, 202: ApprovalSerializer},
    )
    def partial_update(self, request: Request, name: str) -> Response:
        """Change what is given, and set the number of cells in the named regions, or its range. New cells are placed
        on spares, or on nodes that are launched; superfluous ones drain first. 202 with a request if that empties a
        region and evacuating one takes two; what else was given is done. Team, priority and what may be taken
        concern other deployments: a grant for this one alone does not do for these."""
        deployment = self.get_object()
        payload = ChangeDeploymentSerializer(data=request.data)
        payload.is_valid(raise_exception=True)
        columns, actor, now = dict(payload.validated_data), actor_of(request), clock.now()
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

    @extend_schema(operation_id="deployments_delete", responses={200: DeploymentSerializer})
    def destroy(self, request: Request, name: str) -> Response:
        """Remove a deployment for good, with its ended rollouts and its traffic settings. Responds with what it was.
        409 while a region should have cells of it, a cell has not stopped, or a rollout is active: scale it to 0
        first."""
        deployment = self.get_object()
        shown = self.get_serializer(deployment).data
        deployment_delete(name=deployment.name, actor=actor_of(request), now=clock.now())
        return Response(shown)
