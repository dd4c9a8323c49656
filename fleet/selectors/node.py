"""Nodes with everything that is shown of them, in a number of queries that does not grow with the number of nodes."""

from django.db.models import Count, QuerySet, Value
from django.db.models.functions import Coalesce

from fleet.models import Node
from fleet.planning.states import NodeState


def nodes_described() -> QuerySet[Node]:
    """Nodes with their last report and the cell that they are in: one query.

    `connected` and `agent_version` are False and "" for a node that never reported.
    """
    return Node.objects.select_related("report", "member__cell").annotate(
        connected=Coalesce("report__connected", Value(False)),
        agent_version=Coalesce("report__agent_version", Value("")),
    )


def node_counts_by_region() -> dict[str, dict[str, int]]:
    """Region -> state -> number of nodes; retired ones and states without a node are absent. One query."""
    counts: dict[str, dict[str, int]] = {}
    there = Node.objects.exclude(state=NodeState.RETIRED.value).order_by()
    for region, state, count in there.values_list("region_id", "state").annotate(count=Count("id")):
        counts.setdefault(region, {})[state] = count
    return counts
