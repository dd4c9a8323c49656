"""Rates, pools of capacity and the newest plan of the day over HTTP: parses requests and calls services. Never
decides."""

from enum import StrEnum
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field, extend_schema_serializer
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.autoscaling.selectors import newest_plan
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.capacity.planning.pools import DECLARABLE, Market, pool_state
from fleet.capacity.planning.rates import RateKind
from fleet.capacity.selectors import is_in_state, pools_in_order
from fleet.capacity.services import (
    NewPool,
    pool_change,
    pool_declare,
    pool_delete,
    pool_resume,
    rate_set,
    rate_withdraw,
)
from fleet.clouds.models import CapacityPool
from fleet.reconcile.planning.states import POOL_TONE, PoolState, choices
from fleet.reconcile.selectors.snapshot import spares_by_plan
from fleet.regions.models import Rate
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin, ReadOnlyModelViewSet, ViewSet
from kernel.tones import Tone

KINDS = [(kind.value, kind.value) for kind in RateKind]
UNITS = (
    "`machine_price`: US dollars an hour; `machine_watts`: maximum power of a machine; `grid_intensity`: grams of "
    "CO2 equivalent for a kilowatt-hour; `pue`: power usage effectiveness; `prompt_price`, `cached_price`, "
    "`completion_price`: US dollars per million tokens of prompts, cached prompts (default: as prompts) and "
    "completions."
)


class RateSerializer(serializers.ModelSerializer[Rate]):
    in_force = serializers.BooleanField(default=False, help_text="Whether this rate applies now.")

    class Meta:
        model = Rate
        fields = ["id", "kind", "subject", "region", "market", "value", "valid_from", "in_force", "actor", "created_at"]
        examples = {"subject": "p5.48xlarge"}


class SetRateSerializer(StrictSerializer):
    kind = serializers.ChoiceField(choices=KINDS, help_text=UNITS)
    subject = serializers.CharField(
        max_length=96,
        help_text="An instance type; for `grid_intensity` and `pue` a region; for token prices a deployment.",
    )
    region = serializers.CharField(max_length=64, required=False, help_text="Only machines in this region; empty: all.")
    market = serializers.ChoiceField(
        choices=choices(Market),
        required=False,
        allow_blank=True,
        help_text="Only machines bought in this market; empty: all.",
    )
    value = serializers.DecimalField(max_digits=16, decimal_places=6, min_value=0)
    valid_from = serializers.DateTimeField(required=False, help_text="Default: now. Never in the past.")

    class Meta:
        examples = {"subject": "p5.48xlarge"}


class RateFilter(filters.FilterSet):
    kind = filters.ChoiceFilter(choices=KINDS)
    subject = filters.CharFilter()


class RateViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Rate]):
    """Rates of machines, power and tokens that operators set from a time on. They override the provider's data and
    price lists. Past rates stay, because usage was billed by them."""

    serializer_class = RateSerializer
    filterset_class = RateFilter
    page_order = "-id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "kind", "subject", "valid_from", "created_at")
    measured = frozenset({"in_force"})
    columns = "ID, KIND, SUBJECT, REGION, MARKET, FROM=valid_from, IN FORCE, VALUE, BY=actor"

    def get_queryset(self) -> QuerySet[Rate]:
        now = clock.now()
        later = Rate.objects.filter(
            kind=OuterRef("kind"), subject=OuterRef("subject"), region=OuterRef("region"), market=OuterRef("market"),
            valid_from__gt=OuterRef("valid_from"), valid_from__lte=now,
        )  # fmt: skip
        begun = Rate.objects.filter(pk=OuterRef("pk"), valid_from__lte=now)
        return Rate.objects.annotate(in_force=Exists(begun) & ~Exists(later))

    @extend_schema(request=SetRateSerializer)
    def create(self, request: Request) -> Response:
        """Set a rate from a time on. 409 if one begins at exactly that time."""
        body = body_of(request, SetRateSerializer)
        fields = {**body, "kind": RateKind(body["kind"])}
        row = rate_set(**fields, actor=actor_of(request), now=clock.now())
        return Response(RateSerializer(self.get_queryset().get(pk=row.pk)).data)

    def destroy(self, request: Request, id: str) -> Response:
        """Withdraw a rate that is not in force yet, and return it. 409 otherwise."""
        row = self.get_object()
        rate_withdraw(rate_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(RateSerializer(row).data)


PRICE_MOST = 10_000.0
POSITION_MOST = 1000


class PoolOrigin(StrEnum):
    """Source of a pool: the region's stack, or a user."""

    STACK = "stack"
    PERSON = "person"


POOL_STATES = choices(PoolState)
MARKETS = choices(Market)
ORIGINS = choices(PoolOrigin)


class CapacityPoolSerializer(serializers.ModelSerializer[CapacityPool]):
    region = serializers.CharField(source="region_id")
    instance_type = serializers.CharField(source="instance_type_id")
    position = serializers.IntegerField(help_text="Order among the pools of its region and type.")
    market = serializers.ChoiceField(choices=MARKETS, help_text="How its machines are bought.")
    origin = serializers.SerializerMethodField(
        help_text="`stack`: found in the region's stack. `person`: declared by a user."
    )
    declared_by = serializers.CharField(help_text="The user who declared it; empty for pools of the stack.")
    state = serializers.SerializerMethodField(help_text="Whether machines can be launched from it now.")
    tone = serializers.SerializerMethodField()
    max_price = serializers.FloatField(
        allow_null=True, help_text="US dollars an hour, for spot; null: the on-demand price."
    )
    price_per_hour = serializers.FloatField(
        allow_null=True, help_text="US dollars for a machine, from AWS's lists; null: unknown."
    )
    free = serializers.IntegerField(allow_null=True, help_text="Free machines of its reservation; null: unknown.")
    network_nodes = serializers.ListField(
        child=serializers.CharField(), help_text="Network nodes of its reservation, widest first; empty: unknown."
    )
    pause_reason = serializers.CharField(help_text="Why it is paused; stays after the pause.")
    failures = serializers.IntegerField(help_text="Launches in a row without capacity.")

    class Meta:
        model = CapacityPool
        fields = [
            "id", "region", "instance_type", "position", "market", "zone", "zone_id", "subnet", "image", "reservation",
            "placement_group", "network_nodes", "max_price", "price_per_hour", "price_at", "ends_at",
            "free", "enabled", "origin", "declared_by",
            "state", "tone", "paused_until", "pause_reason", "failures",
        ]  # fmt: skip
        examples = {
            "zone_id": "use1-az1",
            "subnet": "subnet-0a1b2c3d4e5f60718",
            "placement_group": "",
            "network_nodes": [],
            "declared_by": "ada",
            "pause_reason": "InsufficientInstanceCapacity: there is none",
        }

    @extend_schema_field(serializers.ChoiceField(choices=ORIGINS))
    def get_origin(self, pool: CapacityPool) -> str:
        return (PoolOrigin.PERSON if pool.declared_by else PoolOrigin.STACK).value

    @extend_schema_field(serializers.ChoiceField(choices=POOL_STATES))
    def get_state(self, pool: CapacityPool) -> str:
        return pool_state(pool.view(), clock.now()).value

    @extend_schema_field(serializers.ChoiceField(choices=choices(Tone)))
    def get_tone(self, pool: CapacityPool) -> str:
        return POOL_TONE[pool_state(pool.view(), clock.now())].value


def _price(**options: Any) -> serializers.FloatField:
    says = "US dollars an hour for a machine, for spot; null: the on-demand price."
    return serializers.FloatField(min_value=0.0001, max_value=PRICE_MOST, allow_null=True, help_text=says, **options)


def _position() -> serializers.IntegerField:
    says = "Order among the pools of its region and type, from 0; a larger number than the last means last."
    return serializers.IntegerField(min_value=0, max_value=POSITION_MOST, required=False, help_text=says)


class ChangePoolSerializer(WhySerializer):
    """Omitted fields stay unchanged."""

    enabled = serializers.BooleanField(required=False, help_text="Whether machines are launched from it.")
    position = _position()
    max_price = _price(required=False)

    class Meta:
        examples = {"enabled": False, "why": "the zone has trouble"}


class DeclarePoolSerializer(WhySerializer):
    region = serializers.CharField(max_length=64)
    instance_type = serializers.CharField(max_length=64)
    market = serializers.ChoiceField(
        choices=MARKETS, default=Market.SPOT.value, help_text=f"{' or '.join(DECLARABLE)}; others come from the stack."
    )
    zone = serializers.CharField(max_length=32, help_text="Name in this account, such as us-east-1a.")
    position = _position()
    max_price = _price(default=None)

    class Meta:
        examples = {"market": "spot", "max_price": 9.5}

    def stated(self) -> NewPool:
        columns = {name: value for name, value in self.validated_data.items() if name != "why"}
        return NewPool(**{**columns, "market": Market(columns["market"])})


class CapacityPoolFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")
    instance_type = filters.CharFilter(field_name="instance_type_id")
    market = filters.MultipleChoiceFilter(choices=MARKETS, distinct=False, help_text="May be repeated.")
    state = filters.ChoiceFilter(choices=POOL_STATES, method="in_state")
    zone = filters.CharFilter()

    def in_state(self, pools: QuerySet[CapacityPool], name: str, value: str) -> QuerySet[CapacityPool]:
        return pools.filter(is_in_state(PoolState(value), clock.now()))


class CapacityPoolViewSet(ReadOnlyModelViewSet[CapacityPool]):
    """Ways to get machines of a type in a cloud region: a market in a zone. Used in the order of `position`."""

    serializer_class = CapacityPoolSerializer
    filterset_class = CapacityPoolFilter
    lookup_value_regex = r"[0-9]{1,9}"
    ordering_fields = ("region", "instance_type", "position", "market", "zone")
    watch_kind = "capacity-pool"
    measured = frozenset(
        {"state", "tone", "free", "price_per_hour", "price_at", "paused_until", "pause_reason", "failures"}
    )
    aliases = ("pools",)
    columns = (
        "ID, REGION, TYPE=instance_type, PLACE=position, MARKET, ZONE, STATE, $/H=price_per_hour, FREE, "
        "RESERVATION, FROM=declared_by:or=stack, RESTS UNTIL=paused_until"
    )

    def get_queryset(self) -> QuerySet[CapacityPool]:
        return pools_in_order()

    @extend_schema(operation_id="capacity_pools_declare", request=DeclarePoolSerializer)
    def create(self, request: Request) -> Response:
        """Declare a pool that no stack names, such as spot. It uses the subnet and image of the type's other pools in
        that zone. 409 if it exists."""
        body = DeclarePoolSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        pool = pool_declare(body.stated(), actor=actor_of(request), now=clock.now(), why=body.validated_data["why"])
        return Response(self.get_serializer(pool).data)

    @extend_schema(request=ChangePoolSerializer)
    def partial_update(self, request: Request, id: str) -> Response:
        """Enable or disable a pool, or change its order or the highest spot price. Later readings of the stack keep the
        change. Running machines stay."""
        pool = self.get_object()
        columns = body_of(request, ChangePoolSerializer)
        why = columns.pop("why")
        pool_change(pool_id=pool.pk, columns=columns, actor=actor_of(request), now=clock.now(), why=why)
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, id: str) -> Response:
        """End the pause of a pool immediately. Repeating changes nothing."""
        return self.act_on_object(request, pool_resume, "pool_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def remove(self, request: Request, id: str) -> Response:
        """Remove a pool that a user declared, and return it; its machines stay. 409 for a pool of the stack: disable
        it."""
        return self.remove_object(request, pool_delete, "pool_id", WhySerializer)


SLOTS_HELP = "One value for each slot."


def _slots(**more: Any) -> serializers.ListField:
    return serializers.ListField(child=serializers.FloatField(), help_text=more.pop("help_text", SLOTS_HELP), **more)


class DayPlanPlaceSerializer(serializers.ModelSerializer[DayPlanPlace]):
    deployment = serializers.CharField(source="deployment_id")
    region = serializers.CharField(source="region_id")
    cells = serializers.ListField(child=serializers.IntegerField(), help_text=SLOTS_HELP)
    by_type = serializers.DictField(
        child=serializers.ListField(child=serializers.IntegerField()), help_text="Number of cells by instance type."
    )
    expected = _slots(help_text="Expected concurrent real-time requests (p50).")
    cover = _slots(help_text="Concurrent requests that cells must have room for at their target.")
    budget = _slots(help_text="Concurrent requests for batches; empty without a forecast.")
    due = _slots(help_text="Of these, planned for due batches.")

    class Meta:
        model = DayPlanPlace
        fields = ["deployment", "region", "cells", "by_type", "expected", "cover", "budget", "due"]
        examples = {"by_type": {"trn1.32xlarge": [2, 3]}}


class PlannedMachinesSerializer(serializers.Serializer[Any]):
    region = serializers.CharField()
    instance_type = serializers.CharField()
    pool = serializers.CharField()
    machines = serializers.ListField(child=serializers.IntegerField(), help_text=SLOTS_HELP)

    class Meta:
        examples = {"pool": "on_demand in usw2-az1"}


class WarmMachinesSerializer(serializers.Serializer[Any]):
    """Machines that are launched early or kept for planned cells of autoscaled deployments."""

    region = serializers.CharField()
    instance_type = serializers.CharField()
    machines = serializers.IntegerField()
    reason = serializers.CharField()


class OrderSerializer(serializers.Serializer[Any]):
    at_s = serializers.FloatField(help_text="Seconds after the start of the plan.")
    kind = serializers.ChoiceField(choices=["start", "stop", "move", "launch", "give_back"])
    deployment = serializers.CharField(help_text="Empty for machines.")
    region = serializers.CharField()
    instance_type = serializers.CharField()
    count = serializers.IntegerField(help_text="Number of cells or machines.")
    dollars = serializers.FloatField(help_text="Cost of an hour and of the shift; below 0: savings in an hour.")
    reason = serializers.CharField()
    taken_from = serializers.CharField(help_text="Source of the nodes, or pool of the machines.")

    class Meta:
        examples = {"taken_from": ""}


class LackSerializer(serializers.Serializer[Any]):
    deployment = serializers.CharField()
    region = serializers.CharField()
    what = serializers.ChoiceField(choices=["realtime", "batch"])
    at_s = serializers.FloatField(help_text="Seconds after the start of the plan; for batches, when they are due.")
    requests = serializers.FloatField(help_text="Peak of concurrent requests; for batches the mean until they are due.")
    reason = serializers.CharField()
    lasts_s = serializers.IntegerField()


@extend_schema_serializer(many=False)
class DayPlanSerializer(serializers.ModelSerializer[DayPlan]):
    at = serializers.DateTimeField(allow_null=True, help_text="Start of the first slot; null: no plan yet.")
    made_at = serializers.DateTimeField(allow_null=True)
    slot_s = serializers.IntegerField()
    solver = serializers.CharField(help_text="Solver: whole, lp or greedy.")
    why = serializers.CharField(help_text="Why no better solver was used.")
    took_s = serializers.FloatField()
    shifts = serializers.IntegerField(help_text="Number of cell starts.")
    total = serializers.FloatField(help_text="US dollars.")
    dollars = _slots(help_text="US dollars for each slot.")
    places = DayPlanPlaceSerializer(many=True)
    machines = PlannedMachinesSerializer(many=True)
    warm = serializers.SerializerMethodField(help_text="Machines that the plan keeps warm now.")
    orders = OrderSerializer(many=True)
    lacks = LackSerializer(many=True)

    class Meta:
        model = DayPlan
        fields = [
            "at", "made_at", "slot_s", "solver", "why", "took_s", "shifts", "total", "dollars", "places", "machines",
            "warm", "orders", "lacks",
        ]  # fmt: skip
        examples = {"solver": "whole"}

    @extend_schema_field(WarmMachinesSerializer(many=True))
    def get_warm(self, row: DayPlan) -> list[dict[str, Any]]:
        return [
            {"region": region, "instance_type": kind, "machines": spares.count, "reason": spares.reason}
            for (region, kind), spares in spares_by_plan(clock.now()).items()
        ]


EMPTY: dict[str, Any] = {
    "at": None, "made_at": None, "slot_s": 0, "solver": "", "why": "", "took_s": 0.0, "shifts": 0, "total": 0.0,
    "dollars": [], "places": [], "machines": [], "warm": [], "orders": [], "lacks": [],
}  # fmt: skip


class CapacityPlanViewSet(ViewSet):
    """The plan of the next day: cells, machines, batch budgets, orders, dollars."""

    @extend_schema(operation_id="capacity_plan_show", responses={200: DayPlanSerializer})
    def list(self, request: Request) -> Response:
        plan = newest_plan()
        return Response(EMPTY if plan is None else DayPlanSerializer(plan).data)


ROUTES = (
    ("capacity-plan", CapacityPlanViewSet, "capacity-plan"),
    ("capacity-pools", CapacityPoolViewSet, "capacity-pool"),
    ("rates", RateViewSet, "rate"),
)
