"""Pools of capacity over HTTP: see them, say which are used and in what order, add some. Decides nothing; services
do."""

from enum import StrEnum
from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.models import CapacityPool
from fleet.planning.markets import Market
from fleet.planning.pools import DECLARABLE, pool_state
from fleet.planning.states import POOL_TONE, PoolState, choices
from fleet.selectors.capacity_pool import is_in_state, pools_in_order
from fleet.services.capacity_pool import NewPool, pool_change, pool_declare, pool_delete, pool_resume
from kernel import clock
from kernel.rest.serializers import WhySerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone

PRICE_MOST = 10_000.0
POSITION_MOST = 1000


class PoolOrigin(StrEnum):
    """Who says that there is a pool: the reading of the region's stack, or a person."""

    STACK = "stack"
    PERSON = "person"


POOL_STATES = choices(PoolState)
MARKETS = choices(Market)
ORIGINS = choices(PoolOrigin)


class CapacityPoolSerializer(serializers.ModelSerializer[CapacityPool]):
    region = serializers.CharField(source="region_id")
    instance_type = serializers.CharField(source="instance_type_id")
    position = serializers.IntegerField(help_text="Among the pools of its region and type; the first is tried first.")
    market = serializers.ChoiceField(choices=MARKETS, help_text="How its machines are bought.")
    origin = serializers.SerializerMethodField(
        help_text="`stack`: the reading of the region's stack found it. `person`: somebody declared it."
    )
    declared_by = serializers.CharField(help_text="Who declared it; empty where the stack's reading found it.")
    state = serializers.SerializerMethodField(help_text="Whether a machine may be launched from it now.")
    tone = serializers.SerializerMethodField()
    max_price = serializers.FloatField(
        allow_null=True, help_text="US dollars an hour, of spot; null: the price on demand."
    )
    price_per_hour = serializers.FloatField(
        allow_null=True, help_text="US dollars for a machine, by AWS's lists; null: not known."
    )
    free = serializers.IntegerField(allow_null=True, help_text="Machines left in its reservation; null: not known.")
    network_nodes = serializers.ListField(
        child=serializers.CharField(), help_text="Those of its reservation, widest first; empty: not known."
    )
    pause_reason = serializers.CharField(help_text="Why it rests; it may remain after the rest is over.")
    failures = serializers.IntegerField(help_text="Launches in a row that found no capacity.")

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
    says = "US dollars an hour for one machine, of spot; null: the price on demand."
    return serializers.FloatField(min_value=0.0001, max_value=PRICE_MOST, allow_null=True, help_text=says, **options)


def _position() -> serializers.IntegerField:
    says = "Its place among the pools of its region and type, from 0; past the last one it comes last."
    return serializers.IntegerField(min_value=0, max_value=POSITION_MOST, required=False, help_text=says)


class ChangePoolSerializer(WhySerializer):
    """Whatever is left out stays as it is."""

    enabled = serializers.BooleanField(required=False, help_text="Whether machines are launched from it.")
    position = _position()
    max_price = _price(required=False)

    class Meta:
        examples = {"enabled": False, "why": "the zone has trouble"}


class DeclarePoolSerializer(WhySerializer):
    region = serializers.CharField(max_length=64)
    instance_type = serializers.CharField(max_length=64)
    market = serializers.ChoiceField(
        choices=MARKETS, default=Market.SPOT.value, help_text=f"{' or '.join(DECLARABLE)}; others are found."
    )
    zone = serializers.CharField(max_length=32, help_text="By its name in this account, such as us-east-1a.")
    position = _position()
    max_price = _price(default=None)

    class Meta:
        examples = {"market": "spot", "max_price": 9.5}

    def stated(self) -> NewPool:
        """What was sent, as `pool_declare` takes it."""
        columns = {name: value for name, value in self.validated_data.items() if name != "why"}
        return NewPool(**{**columns, "market": Market(columns["market"])})


class CapacityPoolFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")
    instance_type = filters.CharFilter(field_name="instance_type_id")
    market = filters.MultipleChoiceFilter(choices=MARKETS, distinct=False, help_text="May be repeated.")
    state = filters.ChoiceFilter(choices=POOL_STATES, method="in_state")
    zone = filters.CharFilter()

    class Meta:
        model = CapacityPool
        fields: list[str] = []

    def in_state(self, pools: QuerySet[CapacityPool], name: str, value: str) -> QuerySet[CapacityPool]:
        return pools.filter(is_in_state(PoolState(value), clock.now()))


class CapacityPoolViewSet(ReadOnlyModelViewSet[CapacityPool]):
    """Ways to get machines of a type in a region of a cloud: a market in a zone. Tried in the order of `position`."""

    serializer_class = CapacityPoolSerializer
    filterset_class = CapacityPoolFilter
    lookup_field = "pk"
    lookup_url_kwarg = "id"
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

    @extend_schema(
        operation_id="capacity_pools_declare", request=DeclarePoolSerializer, responses={200: CapacityPoolSerializer}
    )
    def create(self, request: Request) -> Response:
        """Declare a pool that no reading of a stack finds, such as spot. It takes subnet and image from the type's
        other pools in that zone. 409 if it is there already."""
        body = DeclarePoolSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        pool = pool_declare(body.stated(), actor=actor_of(request), now=clock.now(), why=body.validated_data["why"])
        return Response(self.get_serializer(pool).data)

    @extend_schema(
        operation_id="capacity_pools_change", request=ChangePoolSerializer, responses={200: CapacityPoolSerializer}
    )
    def partial_update(self, request: Request, id: str) -> Response:
        """Switch it on or off, put it earlier or later, change the highest price of spot. No reading of the stack
        takes that back. Machines that run stay."""
        pool = self.get_object()
        body = ChangePoolSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        columns = dict(body.validated_data)
        why = columns.pop("why")
        pool_change(pool_id=pool.pk, columns=columns, actor=actor_of(request), now=clock.now(), why=why)
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(operation_id="capacity_pools_resume", request=WhySerializer, responses={200: CapacityPoolSerializer})
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, id: str) -> Response:
        """Let a resting pool be tried again at once. Repeating changes nothing."""
        pool, body = self.get_object(), WhySerializer(data=request.data)
        body.is_valid(raise_exception=True)
        pool_resume(pool_id=pool.pk, actor=actor_of(request), now=clock.now(), why=body.validated_data["why"])
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(operation_id="capacity_pools_remove", request=WhySerializer, responses={200: CapacityPoolSerializer})
    @action(detail=True, methods=["post"])
    def remove(self, request: Request, id: str) -> Response:
        """Remove a pool that a person declared; its machines stay. Responds with what it was. 409 for one that the
        stack's reading found: switch it off."""
        pool, body = self.get_object(), WhySerializer(data=request.data)
        body.is_valid(raise_exception=True)
        shown = self.get_serializer(pool).data
        pool_delete(pool_id=pool.pk, actor=actor_of(request), now=clock.now(), why=body.validated_data["why"])
        return Response(shown)
