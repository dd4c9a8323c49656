"""Audit records over HTTP: changes and refusals, newest first, for operators and administrators. Never writes:
audit.middleware does."""

import json
from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from audit.models import AuditRecord, Outcome, Proof
from fleet.reconcile.planning.states import choices
from kernel.access import Role
from kernel.rest.view_sets import ReadOnlyModelViewSet


class AuditSerializer(serializers.ModelSerializer[AuditRecord]):
    outcome = serializers.ChoiceField(choices=choices(Outcome))
    proof = serializers.ChoiceField(choices=choices(Proof), help_text="How the actor authenticated.")
    object = serializers.CharField(help_text="The requested object, `noun/key`; empty if it had no name yet.")
    about = serializers.ListField(child=serializers.CharField(), help_text="All changed objects, `noun/key`.")
    changes = serializers.SerializerMethodField(help_text="The request, the changed rows, and the events.")

    class Meta:
        model = AuditRecord
        fields = [
            "number", "at", "outcome", "actor", "proof", "address", "token_prefix", "action", "object", "about",
            "reason", "request_id", "changes", "previous", "digest",
        ]  # fmt: skip
        examples = {
            "token_prefix": "0a1b2c3d4e5f60",
            "object": "rollout/12",
            "about": ["rollout/12", "deployment/sim-70b"],
            "request_id": "5b0e2c1f9a7d4e3b8c6a1d2f3e4b5a6c",
            "changes": {"asked": {"why": "latency looks odd"}},
            "previous": "5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f",
        }

    @extend_schema_field(serializers.DictField())
    def get_changes(self, record: AuditRecord) -> dict[str, Any]:
        return dict(json.loads(record.changes))


class AuditFilter(filters.FilterSet):
    actor = filters.CharFilter(help_text="User, agent, or service account.")
    action = filters.CharFilter(help_text="For example `rollout.pause`.")
    object = filters.CharFilter(method="about_it", help_text="`noun/key` of any changed object: `cell/x`.")
    outcome = filters.ChoiceFilter(choices=choices(Outcome))
    proof = filters.ChoiceFilter(choices=choices(Proof))
    token_prefix = filters.CharFilter()
    request_id = filters.CharFilter(help_text="`X-Request-Id` of the request.")
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At or after.")
    until = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt", help_text="Before.")

    def about_it(self, records: "QuerySet[AuditRecord]", name: str, value: str) -> "QuerySet[AuditRecord]":
        return records.filter(about__contains=[value])


class AuditViewSet(ReadOnlyModelViewSet[AuditRecord]):
    """Changes and refusals, newest first. The first record is the head of the chain: store its `number` and `digest`
    elsewhere to prove later that no earlier record was changed (`manage.py audit_verify --head`)."""

    queryset = AuditRecord.objects.all()
    serializer_class = AuditSerializer
    filterset_class = AuditFilter
    lookup_field = "number"
    lookup_url_kwarg = "id"
    page_order = "-number"
    needs = {"list": Role.OPERATOR, "retrieve": Role.OPERATOR}
