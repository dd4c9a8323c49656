"""Certificates for applications over HTTP: names, issuer and end, and never a key. Decides nothing; services do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.models import ApplicationCertificate
from fleet.planning.application_certificate import CHAIN_LENGTH_MAX, KEY_LENGTH_MAX
from fleet.services.application_certificate import (
    NAME_LENGTH_MAX,
    application_certificate_remove,
    application_certificate_set,
)
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin


class CertificateSerializer(serializers.ModelSerializer[ApplicationCertificate]):
    region = serializers.CharField(source="region_id", allow_null=True, help_text="Null: every region shows it.")
    names = serializers.ListField(child=serializers.CharField(), help_text="Hosts and addresses that it is for.")
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
        max_length=NAME_LENGTH_MAX, help_text="A new name, or that of the certificate whose place it takes."
    )
    region = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Left out: every region, or as before."
    )
    certificate = serializers.CharField(
        max_length=2 * CHAIN_LENGTH_MAX, help_text="PEM: the certificate first, then each that signed the one before."
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

    class Meta:
        model = ApplicationCertificate
        fields: list[str] = []


class CertificateViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[ApplicationCertificate]):
    """What ingresses show to applications that connect over TLS, chosen by the host that these ask for."""

    serializer_class = CertificateSerializer
    filterset_class = CertificateFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w]{1,40}"
    page_order = "id"
    needs = {"list": Role.OPERATOR, "retrieve": Role.OPERATOR}
    ordering_fields = ("name", "not_after", "created_at", "changed_at")
    aliases = ("cert", "certs")
    columns = "NAME, REGION, HOSTS=names, ISSUER, KEY=key_kind, ENDS=not_after"

    def get_queryset(self) -> QuerySet[ApplicationCertificate]:
        return ApplicationCertificate.objects.all()

    @extend_schema(
        operation_id="certificates_set", request=SetCertificateSerializer, responses={200: CertificateSerializer}
    )
    def create(self, request: Request) -> Response:
        """Set a certificate, or another one in the place of that of the same name: streams go on, new connections see
        it within seconds. 409 if another certificate is for one of its hosts."""
        body = SetCertificateSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = application_certificate_set(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(CertificateSerializer(row).data)

    @extend_schema(operation_id="certificates_remove", request=None, responses={200: CertificateSerializer})
    @action(detail=True, methods=["post"])
    def remove(self, request: Request, name: str) -> Response:
        """Show a certificate no longer. Responds with what it was. 409 if a region that refuses plain HTTP would have
        none left."""
        row = self.get_object()
        shown = CertificateSerializer(row).data
        application_certificate_remove(name=row.name, actor=actor_of(request), now=clock.now())
        return Response(shown)
