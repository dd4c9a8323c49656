"""The last lines of the logs of nodes over HTTP. Reading them makes the agents send them; nothing else."""

from collections.abc import Callable, Iterable
from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.states import MemberRole
from fleet.planning.states import choices
from fleet.selectors.node_log import NodeLines
from fleet.services.node_log import node_logs_request
from kernel import clock
from kernel.rest.serializers import StrictSerializer

SOURCES = ("engine", "proxy", "agent")
LINES_DEFAULT = 200


class LogSerializer(serializers.Serializer[Any]):
    name = serializers.CharField(help_text="`agent`, `engine` or `proxy`.")
    lines = serializers.ListField(
        child=serializers.CharField(), help_text="Oldest first, at most 200; what looks like a secret is taken out."
    )

    class Meta:
        examples = {"name": "engine"}


class NodeLinesSerializer(serializers.Serializer[NodeLines]):
    node = serializers.CharField()
    rank = serializers.IntegerField(help_text="0 leads.")
    role = serializers.ChoiceField(choices=choices(MemberRole))
    said_at = serializers.DateTimeField(allow_null=True, help_text="null: its agent has not sent any yet.")
    is_of_cell = serializers.BooleanField(
        help_text="Whether they are of this generation, and not of what ran there before."
    )
    logs = LogSerializer(many=True)


class LogsSerializer(serializers.Serializer[Any]):
    """The first response may be empty: read again after two seconds. Agents go on for a minute after the last read."""

    lines = serializers.ListField(
        child=serializers.CharField(), help_text="Of the requested log, of the first node that has one."
    )
    nodes = NodeLinesSerializer(many=True, help_text="All logs of all nodes, in the order of ranks.")


class LogOptionsSerializer(StrictSerializer):
    """Which log, and how many lines."""

    # The base class has an attribute of this name, which says where a value is taken from.
    source: Any = serializers.ChoiceField(choices=[(name, name) for name in SOURCES], default="engine")
    lines = serializers.IntegerField(
        min_value=1, max_value=1000, default=LINES_DEFAULT, help_text="Of each log, at most."
    )


def logs_read(request: Request, read: Callable[[], tuple[NodeLines, ...]], nodes: Iterable[str]) -> Response:
    """Request these nodes' lines, and respond with those that arrived so far."""
    payload = LogOptionsSerializer(data=request.query_params)
    payload.is_valid(raise_exception=True)
    node_logs_request(nodes=nodes, now=clock.now())
    return Response(
        LogsSerializer(_body(read(), payload.validated_data["source"], payload.validated_data["lines"])).data
    )


def _body(nodes: tuple[NodeLines, ...], source: str, limit: int) -> dict[str, Any]:
    rows = [
        {
            "node": node.node,
            "rank": node.rank,
            "role": node.role,
            "said_at": node.said_at,
            "is_of_cell": node.is_of_cell,
            "logs": [{"name": name, "lines": lines[-limit:]} for name, lines in sorted(node.logs.items())],
        }
        for node in nodes
    ]
    shown = next((node.logs[source] for node in nodes if source in node.logs), [])
    return {"lines": shown[-limit:], "nodes": rows}
