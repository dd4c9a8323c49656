"""Rates of machines, power, the grid and tokens over HTTP: the whole list, and what is set from a time on. Decides
nothing; services do."""

from django.db.models import Exists, OuterRef, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.models import Rate
from fleet.planning.markets import Market
from fleet.planning.rate import RateKind
from fleet.planning.states import choices
from fleet.services.rate import rate_set, rate_withdraw
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin

KINDS = [(kind.value, kind.value) for kind in RateKind]
UNITS = (
    "`machine_price`: US dollars an hour; `machine_watts`: the most that a machine draws; `grid_intensity`: grams of "
    "CO2 equivalent for a kilowatt-hour; `pue`: power usage effectiveness; `prompt_price`, `cached_price`, "
    "`completion_price`: US dollars per million tokens of prompts, of those out of a cache (else as prompts), and of "
    "completions."
)


class RateSerializer(serializers.ModelSerializer[Rate]):
    in_force = serializers.BooleanField(default=False, help_text="Machines or tokens are counted by it now.")

    class Meta:
        model = Rate
        fields = ["id", "kind", "subject", "region", "market", "value", "valid_from", "in_force", "actor", "created_at"]
        examples = {"subject": "p5.48xlarge"}


class SetRateSerializer(StrictSerializer):
    kind = serializers.ChoiceField(choices=KINDS, help_text=UNITS)
    subject = serializers.CharField(
        max_length=96, help_text="An instance type; of `grid_intensity` and `pue` a region; of tokens a deployment."
    )
    region = serializers.CharField(max_length=64, required=False, help_text="Of a machine, there only; all.")
    market = serializers.ChoiceField(
        choices=choices(Market), required=False, allow_blank=True, help_text="Of a price: of machines bought so; all."
    )
    value = serializers.DecimalField(max_digits=16, decimal_places=6, min_value=0)
    valid_from = serializers.DateTimeField(required=False, help_text="Now, if it is left out; never before.")

    class Meta:
        examples = {"subject": "p5.48xlarge"}


class RateFilter(filters.FilterSet):
    kind = filters.ChoiceFilter(choices=KINDS)
    subject = filters.CharFilter()

    class Meta:
        model = Rate
        fields: list[str] = []


class RateViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Rate]):
    """What operators state of machines, power and tokens. It comes before what providers and lists say, from a time on;
    machines and tokens are counted by what is in force then, so the list only grows."""

    serializer_class = RateSerializer
    filterset_class = RateFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
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

    @extend_schema(operation_id="rates_create", request=SetRateSerializer, responses={200: RateSerializer})
    def create(self, request: Request) -> Response:
        """State a rate from a time on. 409 if there is one from that very time."""
        body = SetRateSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        fields = {**body.validated_data, "kind": RateKind(body.validated_data["kind"])}
        row = rate_set(**fields, actor=actor_of(request), now=clock.now())
        return Response(RateSerializer(self.get_queryset().get(pk=row.pk)).data)

    @extend_schema(operation_id="rates_delete", responses={200: RateSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Withdraw a rate that is not in force yet. 409 if it was. Responds with what it was."""
        row = self.get_object()
        rate_withdraw(rate_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(RateSerializer(row).data)
