"""Plan drafts over HTTP. Reads only: the console and its forms change drafts, `controlplane.api.apply` applies
documents."""

from typing import Any, ClassVar

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from fleet.drafts.models import PlanDraft
from fleet.drafts.services import digest_of, in_order, object_of
from kernel.access import Role
from kernel.rest.view_sets import ReadOnlyModelViewSet

STATES = (("open", "open"), ("applied", "applied"))


class DraftObjectSerializer(serializers.Serializer[Any]):
    kind = serializers.CharField()
    name = serializers.CharField()

    class Meta:
        examples = {"kind": "Deployment", "name": "sim-70b"}


class DraftSerializer(serializers.ModelSerializer[PlanDraft]):
    key = serializers.CharField(help_text="Random, as in its link.")
    state = serializers.SerializerMethodField()
    digest = serializers.SerializerMethodField(help_text="Changes with the documents.")
    objects = serializers.SerializerMethodField(help_text="Objects that its documents describe.")
    applied_at = serializers.DateTimeField(allow_null=True)
    applied_by = serializers.CharField(help_text="Empty if it was not applied.")

    class Meta:
        model = PlanDraft
        fields = ["key", "name", "owner", "state", "digest", "objects", "changed_at", "applied_at", "applied_by"]
        examples: ClassVar[dict[str, Any]] = {
            "key": "q3X0mZ2hQ8uT7bC1vY5nLw",
            "name": "Campaign",
            "owner": "ada",
            "digest": "5d41402abc4b2a76",
            "applied_at": None,
            "applied_by": "",
        }

    @extend_schema_field(serializers.ChoiceField(choices=STATES))
    def get_state(self, row: PlanDraft) -> str:
        return "applied" if row.applied_at else "open"

    def get_digest(self, row: PlanDraft) -> str:
        return digest_of(row)

    @extend_schema_field(DraftObjectSerializer(many=True))
    def get_objects(self, row: PlanDraft) -> list[dict[str, str]]:
        return [dict(zip(("kind", "name"), object_of(one), strict=True)) for one in row.documents]


class DraftDetailSerializer(DraftSerializer):
    """With the documents as they were written. `POST /api/v1/apply/preview` returns their steps."""

    documents = serializers.SerializerMethodField(help_text="As for apply.")

    class Meta(DraftSerializer.Meta):
        fields = [*DraftSerializer.Meta.fields, "documents"]
        examples = {
            **DraftSerializer.Meta.examples,
            "documents": [
                {
                    "apiVersion": "switchyard/v1",
                    "kind": "Deployment",
                    "metadata": {"name": "sim-70b"},
                    "spec": {"regions": [{"region": "us-west-2", "cells": 3}]},
                }
            ],
        }

    @extend_schema_field(serializers.ListField(child=serializers.DictField()))
    def get_documents(self, row: PlanDraft) -> list[dict[str, Any]]:
        return in_order(row.documents)


class DraftFilter(filters.FilterSet):
    state = filters.ChoiceFilter(choices=STATES, method="filter_state")
    kind = filters.CharFilter(method="filter_kind", help_text="Drafts with a document of this kind.")
    object = filters.CharFilter(method="filter_object", help_text="Drafts with a document of an object of this name.")

    def filter_state(self, rows: QuerySet[PlanDraft], name: str, value: str) -> QuerySet[PlanDraft]:
        return rows.filter(applied_at__isnull=value == "open")

    def filter_kind(self, rows: QuerySet[PlanDraft], name: str, value: str) -> QuerySet[PlanDraft]:
        return rows.filter(documents__contains=[{"kind": value}])

    def filter_object(self, rows: QuerySet[PlanDraft], name: str, value: str) -> QuerySet[PlanDraft]:
        return rows.filter(documents__contains=[{"metadata": {"name": value}}])


class DraftViewSet(ReadOnlyModelViewSet[PlanDraft]):
    """Plan drafts. The list has those of the caller, the last changed first. A single one is readable by every operator
    who has its key, as on its page."""

    queryset = PlanDraft.objects.all()
    filterset_class = DraftFilter
    lookup_field = "key"
    lookup_value_regex = r"[-\w]{1,32}"
    page_order = "-changed_at"
    ordering_fields = ("name", "changed_at", "applied_at")
    needs = {"list": Role.OPERATOR, "retrieve": Role.OPERATOR}
    columns = "KEY, NAME, STATE, OBJECTS=objects:count, CHANGED=changed_at:age"

    def get_serializer_class(self) -> type[DraftSerializer]:
        return DraftDetailSerializer if self.detail else DraftSerializer

    def get_queryset(self) -> QuerySet[PlanDraft]:
        rows = super().get_queryset()
        return rows if self.detail else rows.filter(owner=self.request.user.get_username())


ROUTES = (("drafts", DraftViewSet, "draft"),)
