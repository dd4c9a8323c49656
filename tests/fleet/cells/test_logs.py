"""Reading a cell's logs makes its nodes send them."""

import pytest

from engine_agent.protocol.messages import LogTail
from fleet.nodes.models import NodeLog
from fleet.nodes.services.reports import node_logs_store
from kernel import clock
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = pytest.mark.django_db


def test_the_first_look_asks_and_the_next_one_sees() -> None:
    rows.cell("c1", rows.node("n-1"), rows.node("n-2"))
    first = bearer().get("/api/v1/cells/c1/logs").json()
    assert [(node["node"], node["said_at"], node["logs"]) for node in first["nodes"]] == [
        ("n-1", None, []),
        ("n-2", None, []),
    ]
    node_logs_store(tails={"n-1": LogTail("c1", 1, {"engine": ("ready",)})}, now=clock.now())
    second = bearer().get("/api/v1/cells/c1/logs").json()
    leader = second["nodes"][0]
    assert second["lines"] == ["ready"]
    assert leader["logs"] == [{"name": "engine", "lines": ["ready"]}]
    assert leader["is_of_cell"]


def test_nobody_asks_the_nodes_of_a_cell_that_there_is_not() -> None:
    assert bearer().get("/api/v1/cells/nonsense/logs").status_code == 404
    assert not NodeLog.objects.exists()


def test_which_log_and_how_many_lines_can_be_said() -> None:
    rows.cell("c1", rows.node("n-1"))
    bearer().get("/api/v1/cells/c1/logs")
    node_logs_store(tails={"n-1": LogTail("c1", 1, {"proxy": ("one", "two")})}, now=clock.now())
    response = bearer().get("/api/v1/cells/c1/logs", {"source": "proxy", "lines": "1"})
    assert response.json()["lines"] == ["two"], response.json()
    assert rules(bearer().get("/api/v1/cells/c1/logs", {"source": "kernel"})) == {"source": "invalid_choice"}
