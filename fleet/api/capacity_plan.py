"""The plan of the day over HTTP: the newest, with what it has for each deployment in each region."""

from typing import Any

from drf_spectacular.utils import extend_schema, extend_schema_field, extend_schema_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.models import DayPlan, DayPlanPlace
from fleet.selectors.capacity_plan import newest_plan
from fleet.selectors.snapshot import spares_by_plan
from kernel import clock
from kernel.rest.view_sets import ViewSet

SLOTS_HELP = "A value for each slot."


def _slots(**more: Any) -> serializers.ListField:
    return serializers.ListField(child=serializers.FloatField(), help_text=more.pop("help_text", SLOTS_HELP), **more)


class DayPlanPlaceSerializer(serializers.ModelSerializer[DayPlanPlace]):
    deployment = serializers.CharField(source="deployment_id")
    region = serializers.CharField(source="region_id")
    cells = serializers.ListField(child=serializers.IntegerField(), help_text=SLOTS_HELP)
    by_type = serializers.DictField(
        child=serializers.ListField(child=serializers.IntegerField()), help_text="Its cells by instance type."
    )
    expected = _slots(help_text="Requests at once of real-time work that are expected (p50).")
    cover = _slots(help_text="Requests at once that cells are to have room for at their target.")
    budget = _slots(help_text="Requests at once that batches may have; empty where nobody forecasts the load.")
    due = _slots(help_text="Of these, what batches that are due are counted on to take.")

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
    """Machines that are launched, or not given back, for cells that the plan has soon, where the autoscaler acts."""

    region = serializers.CharField()
    instance_type = serializers.CharField()
    machines = serializers.IntegerField()
    reason = serializers.CharField()


class OrderSerializer(serializers.Serializer[Any]):
    """A change of the next two hours."""

    at_s = serializers.FloatField(help_text="Seconds after the begin of the plan.")
    kind = serializers.ChoiceField(choices=["start", "stop", "move", "launch", "give_back"])
    deployment = serializers.CharField(help_text="Empty: of machines.")
    region = serializers.CharField()
    instance_type = serializers.CharField()
    count = serializers.IntegerField(help_text="Cells, or machines.")
    dollars = serializers.FloatField(help_text="Of an hour, and of the shift; less than 0: saved in an hour.")
    reason = serializers.CharField()
    taken_from = serializers.CharField(help_text="Whose nodes move, or which pool's machines.")

    class Meta:
        examples = {"taken_from": ""}


class LackSerializer(serializers.Serializer[Any]):
    deployment = serializers.CharField()
    region = serializers.CharField()
    what = serializers.ChoiceField(choices=["realtime", "batch"])
    at_s = serializers.FloatField(help_text="Seconds after the begin of the plan; of batches, when they are due.")
    requests = serializers.FloatField(help_text="At once: the most; of batches the mean until they are due.")
    reason = serializers.CharField()
    lasts_s = serializers.IntegerField()


@extend_schema_serializer(many=False)
class DayPlanSerializer(serializers.ModelSerializer[DayPlan]):
    at = serializers.DateTimeField(allow_null=True, help_text="When the first slot begins; null: there is no plan yet.")
    made_at = serializers.DateTimeField(allow_null=True)
    slot_s = serializers.IntegerField()
    solver = serializers.CharField(help_text="whole, lp or greedy: which way it was found.")
    why = serializers.CharField(help_text="By no better one.")
    took_s = serializers.FloatField()
    shifts = serializers.IntegerField(help_text="Starts of cells.")
    total = serializers.FloatField(help_text="US dollars.")
    dollars = _slots(help_text="US dollars, slot by slot.")
    places = DayPlanPlaceSerializer(many=True)
    machines = PlannedMachinesSerializer(many=True)
    warm = serializers.SerializerMethodField(help_text="Machines that are kept warm by it at this moment.")
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
    """What the planner has for the next day: cells, machines, budgets of batches, orders, dollars."""

    @extend_schema(operation_id="capacity_plan_show", responses={200: DayPlanSerializer})
    def list(self, request: Request) -> Response:
        """The newest plan."""
        plan = newest_plan()
        return Response(EMPTY if plan is None else DayPlanSerializer(plan).data)
