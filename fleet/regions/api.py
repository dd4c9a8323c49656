"""Regions and certificates for applications over HTTP: parses requests and calls services. Never
decides, and never returns a key."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.states import PlainHttp
from fleet.agents.models import ApplicationCertificate
from fleet.cells.selectors import cell_counts_by_region
from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.alarms import PREFIX_MOST, SOURCES_MOST
from fleet.load.api import WithLoad
from fleet.load.selectors import region_subject
from fleet.nodes.selectors import node_counts_by_region
from fleet.reconcile.planning.states import CellState, CloudRegionState, NodeState, choices
from fleet.regions.models import Region
from fleet.regions.planner import CHAIN_LENGTH_MAX, KEY_LENGTH_MAX
from fleet.regions.services import (
    NAME_LENGTH_MAX,
    application_certificate_remove,
    application_certificate_set,
    region_change,
    region_create,
    region_delete,
)
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin, ReadOnlyModelViewSet

Counts = serializers.DictField(child=serializers.IntegerField())


class CloudSerializer(serializers.ModelSerializer[CloudRegion]):
    state = serializers.ChoiceField(choices=choices(CloudRegionState), help_text="Usable once it is ready.")
    reason = serializers.CharField(help_text="Why it is not ready; empty if ready.")

    class Meta:
        model = CloudRegion
        fields = ["aws_region", "stack", "state", "reason", "read_at", "machines_cap", "price_cap"]


class RegionSerializer(serializers.ModelSerializer[Region]):
    # The context has the counts of all regions: `nodes` and `cells`, region -> state -> number.
    spares = serializers.SerializerMethodField(help_text="Instance type -> number of idle nodes to keep warm.")
    repair_only = serializers.SerializerMethodField(help_text="Number of them that new cells must leave for repairs.")
    ingress_url = serializers.CharField(help_text="URL for requests of applications in this region.")
    plain_http = serializers.ChoiceField(
        choices=choices(PlainHttp),
        help_text="Clients that its ingresses serve without TLS: all, none, or their own host.",
    )
    alarms = serializers.ListField(child=serializers.DictField(), help_text="Named alarms of CloudWatch.")
    cloud = CloudSerializer(allow_null=True, default=None, read_only=True, help_text="Null outside clouds.")
    nodes = serializers.SerializerMethodField(help_text="State -> number of nodes, without retired ones.")
    cells = serializers.SerializerMethodField(help_text="State -> number of cells, without stopped ones.")

    class Meta:
        model = Region
        fields = [
            "name",
            "provider",
            "position",
            "ingress_url",
            "spares",
            "repair_only",
            "plain_http",
            "cheapest_first",
            "grpc",
            "alarms",
            "cloud",
            "nodes",
            "cells",
        ]
        examples = {
            "name": "us-east-1",
            "repair_only": {"local.sim": 0},
            "nodes": {"joining": 0, "ready": 6, "suspect": 0, "faulty": 0, "lost": 0},
            "cells": {"pending": 0, "starting": 1, "ready": 2, "draining": 0, "failed": 0, "lost": 0},
        }

    @extend_schema_field(Counts)
    def get_spares(self, region: Region) -> dict[str, int]:
        return {kind: spares.warm for kind, spares in region.warm_spares().items()}

    @extend_schema_field(Counts)
    def get_repair_only(self, region: Region) -> dict[str, int]:
        return {kind: spares.repair_only for kind, spares in region.warm_spares().items()}

    @extend_schema_field(Counts)
    def get_nodes(self, region: Region) -> dict[str, int]:
        return _every_state(NodeState, NodeState.RETIRED, self.context["nodes"].get(region.name, {}))

    @extend_schema_field(Counts)
    def get_cells(self, region: Region) -> dict[str, int]:
        return _every_state(CellState, CellState.STOPPED, self.context["cells"].get(region.name, {}))


def _every_state(states: type[StrEnum], ended: StrEnum, counts: Mapping[str, int]) -> dict[str, int]:
    return {state.value: counts.get(state.value, 0) for state in states if state is not ended}


class AlarmSourceSerializer(StrictSerializer):
    prefix = serializers.CharField(
        max_length=PREFIX_MOST,
        help_text="Beginning of the names of alarms; `{node}` or `{cell}` in it stands for the ID of one.",
    )
    replaces = serializers.BooleanField(
        required=False,
        default=False,
        help_text="A machine in such an alarm is replaced, without other evidence, if the alarm is about this machine "
        "alone. Otherwise it opens an incident.",
    )

    class Meta:
        examples = {"prefix": "switchyard-node-"}


class _RegionColumns(StrictSerializer):
    position = serializers.IntegerField(
        min_value=0,
        max_value=10_000,
        required=False,
        help_text="Order of regions; also selects the ports of local ingresses.",
    )
    ingress_url = serializers.URLField(
        max_length=200, required=False, allow_blank=True, help_text="URL for requests of applications in this region."
    )
    spares = serializers.DictField(
        required=False,
        help_text="Instance type -> idle nodes to keep warm: a number, or `warm` and `repair_only`.",
    )
    plain_http = serializers.ChoiceField(
        choices=choices(PlainHttp),
        required=False,
        help_text="Clients that its ingresses serve without TLS; values other than `serve` need a certificate.",
    )
    cheapest_first = serializers.BooleanField(
        required=False,
        help_text="Use the cheapest of equally suitable pools first, regardless of their order.",
    )
    grpc = serializers.BooleanField(
        required=False,
        help_text="Its ingresses also serve gRPC (Open Inference Protocol), 4000 ports above their port for HTTP.",
    )
    alarms = serializers.ListField(
        child=AlarmSourceSerializer(),
        max_length=SOURCES_MOST,
        required=False,
        help_text="Provider `aws` or `ecs`: alarms of CloudWatch in its AWS region that are evidence of faults.",
    )


class ChangeRegionSerializer(_RegionColumns):
    """Omitted fields stay unchanged."""

    class Meta:
        examples = {"spares": {"local.sim": 3}}


class DescribedRegionSerializer(_RegionColumns):
    """The columns of a new region without its name; `provider`, `stack` and `aws_region` never change."""

    provider = serializers.CharField(max_length=32, required=False, help_text="Provider of its machines.")
    stack = serializers.CharField(
        max_length=128, required=False, help_text="Provider `aws` or `ecs`: name of its stack of CloudFormation."
    )
    aws_region = serializers.CharField(
        max_length=32, required=False, help_text="Provider `aws` or `ecs`: AWS's name, if different."
    )


class CreateRegionSerializer(DescribedRegionSerializer):
    name = serializers.SlugField(max_length=64)

    class Meta:
        examples = {
            "name": "eu-west-1",
            "position": 2,
            "ingress_url": "http://127.0.0.1:8082",
            "spares": {"local.sim": {"warm": 2, "repair_only": 1}},
        }


class RegionViewSet(WithLoad, ReadOnlyModelViewSet[Region]):
    """Failure and latency domains, each with own ingresses and nodes."""

    queryset = Region.objects.select_related("cloud")
    serializer_class = RegionSerializer
    filterset_fields = ("provider",)
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "position", "provider")
    watch_kind = "region"
    measured = frozenset({"nodes", "cells"})
    needs_if_match = frozenset({"destroy"})
    aliases = ("rg",)
    columns = "NAME, PROVIDER, NODES=nodes:counts, CELLS=cells:counts, INGRESS=ingress_url"

    def load_subject(self, row: Region) -> str:
        return region_subject(row.name)

    def get_serializer_context(self) -> dict[str, Any]:
        return {
            **super().get_serializer_context(),
            "nodes": node_counts_by_region(),
            "cells": cell_counts_by_region(),
        }

    @extend_schema(request=CreateRegionSerializer)
    def create(self, request: Request) -> Response:
        """Add a region. Its spares are launched immediately; in a cloud, once its stack has been read. 409 if the name
        is taken."""
        columns = body_of(request, CreateRegionSerializer)
        name = columns.pop("name")
        region = region_create(name=name, columns=columns, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(region).data)

    @extend_schema(request=ChangeRegionSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields."""
        region = self.get_object()
        columns = body_of(request, ChangeRegionSerializer)
        region_change(name=region.name, columns=columns, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(self.get_object()).data)

    def destroy(self, request: Request, name: str) -> Response:
        """Delete a region that was never used, and return it. 409 if it has or had nodes, cells, ingresses or
        deployments, whose names are listed: their history stays readable."""
        return self.remove_object(request, region_delete, "name")


class CertificateSerializer(serializers.ModelSerializer[ApplicationCertificate]):
    region = serializers.CharField(source="region_id", allow_null=True, help_text="Null: all regions.")
    names = serializers.ListField(child=serializers.CharField(), help_text="Its hosts and addresses.")
    key_kind = serializers.CharField(help_text="`P-256`, `P-384`, `RSA 2048`.")
    fingerprint = serializers.CharField(help_text="SHA-256 of the certificate, hexadecimal.")

    class Meta:
        model = ApplicationCertificate
        fields = [
            "name", "region", "names", "issuer", "key_kind", "fingerprint", "not_before", "not_after", "actor",
            "created_at", "changed_at",
        ]  # fmt: skip
        examples = {"name": "api", "issuer": "CN=Example CA 3,O=Example", "key_kind": "P-256"}


class SetCertificateSerializer(StrictSerializer):
    name = serializers.CharField(
        max_length=NAME_LENGTH_MAX, help_text="A new name, or the name of the certificate to replace."
    )
    region = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Default: all regions, or unchanged."
    )
    certificate = serializers.CharField(
        max_length=2 * CHAIN_LENGTH_MAX, help_text="PEM: the certificate first, then each signer of the previous one."
    )
    private_key = serializers.CharField(
        max_length=2 * KEY_LENGTH_MAX, write_only=True, help_text="PEM, without a passphrase. Never shown again."
    )

    class Meta:
        examples = {
            "name": "api",
            "certificate": "-----BEGIN CERTIFICATE-----\n…\n-----END CERTIFICATE-----\n",
            "private_key": "(PEM of the private key)",
        }


class CertificateFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")


class CertificateViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[ApplicationCertificate]):
    """Certificates that ingresses present to applications, selected by the requested host."""

    queryset = ApplicationCertificate.objects.all()
    serializer_class = CertificateSerializer
    filterset_class = CertificateFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w]{1,40}"
    page_order = "id"
    needs = {"list": Role.OPERATOR, "retrieve": Role.OPERATOR}
    ordering_fields = ("name", "not_after", "created_at", "changed_at")
    aliases = ("cert", "certs")
    columns = "NAME, REGION, HOSTS=names, ISSUER, KEY=key_kind, ENDS=not_after"

    @extend_schema(operation_id="certificates_set", request=SetCertificateSerializer)
    def create(self, request: Request) -> Response:
        """Add a certificate, or replace the one with the same name: streams continue, and new connections use it within
        seconds. 409 if another certificate has one of its hosts."""
        body = body_of(request, SetCertificateSerializer)
        row = application_certificate_set(**body, actor=actor_of(request), now=clock.now())
        return Response(CertificateSerializer(row).data)

    @action(detail=True, methods=["post"])
    def remove(self, request: Request, name: str) -> Response:
        """Remove a certificate, and return it. 409 if a region that refuses plain HTTP would have none left."""
        return self.remove_object(request, application_certificate_remove, "name")


ROUTES = (
    ("regions", RegionViewSet, "region"),
    ("certificates", CertificateViewSet, "certificate"),
)
