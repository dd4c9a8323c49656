"""Instance types over HTTP: parses requests and calls services. Never decides."""

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from models_registry.instance_types.models import SETTABLE, InstanceType, Origin
from models_registry.instance_types.planner import NAME
from models_registry.instance_types.services import instance_type_change, instance_type_create, instance_type_delete


class InstanceTypeSerializer(RecordSerializer[InstanceType]):
    class Meta:
        model = InstanceType
        fields = ["name", *SETTABLE, "origin", "changed_by", "changed_at"]
        examples = {"name": "g6.12xlarge", "accelerator": "l4", "chips": 4, "cores": 4, "memory_gib": 89.406}


class InstanceTypeColumnsSerializer(ColumnsSerializer):
    """Fields of a type. Omitted fields stay unchanged, or have their defaults."""

    class Meta:
        model = InstanceType
        columns = SETTABLE

    def get_fields(self) -> dict[str, serializers.Field]:  # type: ignore[type-arg] # of any value
        fields = super().get_fields()
        for name in SETTABLE:
            fields[name].required = False
        return fields


class ChangeInstanceTypeSerializer(InstanceTypeColumnsSerializer, WhySerializer):
    class Meta(InstanceTypeColumnsSerializer.Meta):
        examples = {"price_per_hour": 2.5, "why": "new contract"}


class CreateInstanceTypeSerializer(ChangeInstanceTypeSerializer):
    name = serializers.RegexField(NAME, max_length=64)

    class Meta(InstanceTypeColumnsSerializer.Meta):
        examples = {
            "name": "own.2xh100", "accelerator": "h100", "chips": 2, "memory_gib": 160, "vcpus": 64,
            "host_memory_gib": 512,
        }  # fmt: skip

    def get_fields(self) -> dict[str, serializers.Field]:  # type: ignore[type-arg] # of any value
        fields = super().get_fields()
        fields["accelerator"].required = True
        return fields


class InstanceTypeFilter(filters.FilterSet):
    accelerator = filters.CharFilter()
    vendor = filters.CharFilter()
    cpu_arch = filters.CharFilter()
    origin = filters.ChoiceFilter(choices=Origin.choices)


class InstanceTypeViewSet(ReadOnlyModelViewSet[InstanceType]):
    """Types of machines: those shipped with the product, and those that operators or agents added. Prices in US
    dollars."""

    queryset = InstanceType.objects.all()
    serializer_class = InstanceTypeSerializer
    filterset_class = InstanceTypeFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "accelerator", "chips", "memory_gib", "price_per_hour", "watts", "origin")
    watch_kind = "instance-type"
    needs_if_match = frozenset({"destroy"})
    aliases = ("it",)
    columns = (
        "NAME, ACCELERATOR, CHIPS, CORES, GIB=memory_gib, $/H=price_per_hour, TP=tensor_parallel_degree, "
        "CPU=cpu_arch, ORIGIN"
    )

    @extend_schema(request=CreateInstanceTypeSerializer)
    def create(self, request: Request) -> Response:
        """Add a type. Vendor, architecture and cores are those of shipped types with the same accelerator, unless
        stated. 409 if the name is taken."""
        columns = body_of(request, CreateInstanceTypeSerializer)
        row = instance_type_create(**columns, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    @extend_schema(request=ChangeInstanceTypeSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields. 409 if the type is in use and its hardware would change; its users are listed."""
        return self.act_on_object(request, instance_type_change, "name", ChangeInstanceTypeSerializer)

    def destroy(self, request: Request, name: str) -> Response:
        """Delete a type that was added, and return it; a shipped type gets its shipped values back. 409 if it is or was
        used, or is a shipped type without changes."""
        return self.remove_object(request, instance_type_delete, "name")


ROUTES = (("instance-types", InstanceTypeViewSet, "instance-type"),)
