"""The DNS entry over HTTP: planned shares, published weights, and every attempt to publish. Decides nothing; services
do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.reconcile.planning.states import choices
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer
from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.entry.models import Entry, EntryRevision
from traffic.entry.planner import RevisionState
from traffic.entry.selectors import entries_described
from traffic.entry.services import entry_adopt, entry_shares_plan

Weights = serializers.DictField(child=serializers.IntegerField())


class EntrySerializer(serializers.ModelSerializer[Entry]):
    """`revision` counts changes of `shares`; `published` is the number of the weights."""

    shares = serializers.DictField(
        child=serializers.FloatField(), help_text="Region -> planned share, in any unit; default 1."
    )
    weights = serializers.SerializerMethodField(help_text="Region -> weight of 255, as last published.")
    published = serializers.SerializerMethodField(help_text="Number of these weights; 0 if none.")
    state = serializers.SerializerMethodField(
        help_text="State of these weights: sending, pending, in_force; empty before the first."
    )
    held = serializers.CharField(help_text="Why the records are not as wanted, or empty.")
    seen = serializers.CharField(help_text="Fingerprint of the records as last read.")
    seen_weights = serializers.DictField(child=serializers.IntegerField(), help_text="Region -> weight, as last read.")

    class Meta:
        model = Entry
        fields = [
            "name", "shares", "revision", "actor", "changed_at", "weights", "published", "state", "held", "held_since",
            "seen", "seen_weights", "looked_at",
        ]  # fmt: skip
        examples = {"name": "llm.example.com", "seen_weights": {"eu-west-1": 64, "us-east-1": 191}}

    @extend_schema_field(Weights)
    def get_weights(self, entry: Entry) -> dict[str, int]:
        newest = _newest_attempt(entry)
        return newest.weights if newest else {}

    def get_published(self, entry: Entry) -> int:
        newest = _newest_attempt(entry)
        return newest.revision if newest else 0

    def get_state(self, entry: Entry) -> str:
        newest = _newest_attempt(entry)
        return newest.state if newest else ""


def _newest_attempt(entry: Entry) -> EntryRevision | None:
    there = (RevisionState.SENDING, RevisionState.PENDING, RevisionState.IN_FORCE)
    return next((each for each in entry.revisions.all() if each.state in there), None)


class EntryChangeSerializer(StrictSerializer):
    shares = serializers.DictField(
        child=serializers.FloatField(), help_text="Region -> share, in any unit. Replaces all previous shares."
    )


class EntryAdoptSerializer(StrictSerializer):
    seen = serializers.CharField(max_length=16, help_text="Fingerprint of the records that you have read.")


class EntryFilter(filters.FilterSet):
    name = filters.CharFilter()


class EntryViewSet(ReadOnlyModelViewSet[Entry]):
    """DNS name that brings clients to all regions, if the stacks of regions define one."""

    serializer_class = EntrySerializer
    filterset_class = EntryFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.]+"
    ordering_fields = ("name",)
    watch_kind = "entry"
    measured = frozenset({"looked_at"})
    needs = {"partial_update": Role.ADMIN, "adopt": Role.ADMIN}
    columns = "NAME, STATE, PUBLISHED, WEIGHTS, SHARES, HELD"

    def get_queryset(self) -> QuerySet[Entry]:
        return entries_described()

    @extend_schema(request=EntryChangeSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Plan each region's share of clients. They move within minutes, by 5 points or more."""
        return self.act_on_object(request, entry_shares_plan, "name", EntryChangeSerializer)

    @extend_schema(request=EntryAdoptSerializer)
    @action(detail=True, methods=["post"])
    def adopt(self, request: Request, name: str) -> Response:
        """Replace records that this control plane did not write: a person's, or another control plane's. Returns 409 if
        they have changed since `seen`."""
        return self.act_on_object(request, entry_adopt, "name", EntryAdoptSerializer)


class EntryRevisionSerializer(serializers.ModelSerializer[EntryRevision]):
    entry = serializers.CharField(source="entry_id")
    weights = Weights
    trouble = serializers.CharField(help_text="Why it was lost, or empty.")

    class Meta:
        model = EntryRevision
        fields = [
            "id", "entry", "revision", "state", "weights", "reason", "trouble", "change_id", "at", "settled_at",
        ]  # fmt: skip
        examples = {"change_id": "/change/C2682N5HXP0BZ4"}


class EntryRevisionFilter(filters.FilterSet):
    entry = filters.CharFilter(field_name="entry_id")
    state = filters.MultipleChoiceFilter(choices=choices(RevisionState), distinct=False, help_text="May be repeated.")
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At or after.")


class EntryRevisionViewSet(ReadOnlyModelViewSet[EntryRevision]):
    """Attempts to publish weights with reason and outcome, newest first; the last 200."""

    queryset = EntryRevision.objects.all()
    serializer_class = EntryRevisionSerializer
    filterset_class = EntryRevisionFilter
    page_order = "-id"
    ordering_fields = ("id", "at", "revision", "state")
    watch_kind = "entry-revision"
    columns = "AGO=at:age, ENTRY, REVISION, STATE, WEIGHTS, REASON"


ROUTES = (
    ("entry", EntryViewSet, "entry"),
    ("entry-revisions", EntryRevisionViewSet, "entry-revision"),
)
