"""Prices of tokens over HTTP: the whole list, and what is set from a time on. Decides nothing; services do."""

from django.db.models import Exists, OuterRef, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.api import money_examples
from traffic.models import TokenPrice
from traffic.services.price import price_set, price_withdraw


@extend_schema_serializer(examples=[OpenApiExample("price", money_examples.PRICE, response_only=True)])
class PriceSerializer(serializers.ModelSerializer[TokenPrice]):
    prompt = serializers.DecimalField(max_digits=14, decimal_places=6, help_text="US dollars per million tokens.")
    cached = serializers.DecimalField(max_digits=14, decimal_places=6, help_text="Of those out of a cache.")
    completion = serializers.DecimalField(max_digits=14, decimal_places=6)
    in_force = serializers.BooleanField(default=False, help_text="Tokens are charged by it now.")

    class Meta:
        model = TokenPrice
        fields = [
            "id", "deployment", "valid_from", "prompt", "cached", "completion", "in_force", "actor", "created_at",
        ]  # fmt: skip


def _price(**more: object) -> serializers.DecimalField:
    return serializers.DecimalField(max_digits=14, decimal_places=6, min_value=0, **more)  # type: ignore[arg-type]


@extend_schema_serializer(examples=[OpenApiExample("a price", money_examples.NEW_PRICE, request_only=True)])
class SetPriceSerializer(StrictSerializer):
    deployment = serializers.CharField(max_length=96)
    prompt = _price(help_text="US dollars per million prompt tokens.")
    completion = _price(help_text="US dollars per million completion tokens.")
    cached = _price(required=False, allow_null=True, help_text="Of prompt tokens out of a cache; as `prompt`.")
    valid_from = serializers.DateTimeField(required=False, help_text="Now, if it is left out; never before.")


class PriceFilter(filters.FilterSet):
    deployment = filters.CharFilter()

    class Meta:
        model = TokenPrice
        fields: list[str] = []


class PriceViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[TokenPrice]):
    """What a million tokens of a deployment cost, and from when. Tokens are charged by the price that is in force when
    they are counted, so the list only grows."""

    serializer_class = PriceSerializer
    filterset_class = PriceFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "-id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "deployment", "valid_from", "created_at")
    measured = frozenset({"in_force"})

    def get_queryset(self) -> QuerySet[TokenPrice]:
        now = clock.now()
        later = TokenPrice.objects.filter(
            deployment=OuterRef("deployment"), valid_from__gt=OuterRef("valid_from"), valid_from__lte=now
        )
        in_force = TokenPrice.objects.filter(pk=OuterRef("pk"), valid_from__lte=now)
        return TokenPrice.objects.annotate(in_force=Exists(in_force) & ~Exists(later))

    @extend_schema(operation_id="prices_create", request=SetPriceSerializer, responses={200: PriceSerializer})
    def create(self, request: Request) -> Response:
        """Set a price from a time on. 409 if there is one from that very time."""
        body = SetPriceSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = price_set(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(PriceSerializer(self.get_queryset().get(pk=row.pk)).data)

    @extend_schema(operation_id="prices_delete", responses={200: PriceSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Withdraw a price that is not in force yet. 409 if it was. Responds with what it was."""
        row = self.get_object()
        price_withdraw(price_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(PriceSerializer(row).data)
