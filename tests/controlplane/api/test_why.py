"""Why something is as it is, and replays, over HTTP."""

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from fleet.autoscaling.models import ScalingState
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident
from fleet.recorder.models import RecordedRound
from kernel import clock
from tests.controlplane.api.client import bearer, rules
from tests.fleet.recorder.passes import recorded_fleet
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture(scope="module")
def cell(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """A cell on `n-0` and `n-1`; the spare `n-2` is suspect."""
    with recorded_fleet(django_db_blocker) as made:
        yield made


def why(path: str, **query: Any) -> dict[str, Any]:
    response = bearer().get(f"/api/v1/why/{path}", query)
    assert response.status_code == 200, response.content
    return dict(response.json())


def test_a_cell_tells_its_decisions_their_inputs_and_the_other_choices(cell: str) -> None:
    found = why(f"cell/{cell}", alternatives="true")
    assert found["now"][0].startswith("It has been starting for 12 s: placed on n-0, n-1")
    (started,) = found["decisions"]
    assert (started["decision"], started["inputs"]["nodes"]) == ("StartCell", "n-0, n-1")
    assert [other["name"] for other in started["alternatives"]] == ["n-2"]


def test_a_node_tells_the_limits_that_it_was_compared_with(cell: str) -> None:
    found = why("node/n-2", limit=1, current="false")
    assert found["now"] == []
    (suspected,) = found["decisions"]
    assert suspected["limits"] == {"suspect_after_s": 10.0, "lost_after_s": 30.0}


def test_a_deployment_tells_the_latest_check_of_its_size(cell: str) -> None:
    place = DeploymentRegion.objects.get()
    known = {"wanted": 1, "rule": "agreement", "reason": "it keeps 1 cell", "acting": False}
    ScalingState.objects.create(place=place, looked_at=clock.now(), **known)
    found = why("deployment/sim-70b")
    assert [one["decision"] for one in found["decisions"]] == ["StartCell", "CreateCell"]
    wants = "The autoscaler wants 1 cell in us-east-1 (agreement, in shadow mode or paused), checked 0 s ago"
    assert found["now"][-1] == f"{wants}: it keeps 1 cell."


def test_what_does_not_exist_or_fit_is_refused(cell: str) -> None:
    assert bearer().get("/api/v1/why/cell/none").status_code == 404
    assert bearer().get("/api/v1/why/teapot/x").status_code == 404
    for query in ("limit=0", "limit=999999", "limit=x", "alternatives=yes"):
        refused = bearer().get(f"/api/v1/why/cell/{cell}?{query}")
        assert (refused.status_code, list(rules(refused))) == (400, [query.partition("=")[0]])


def incident() -> Incident:
    return Incident.objects.create(kind="silent-node", subject="n-2", node="n-2", summary="silent", opened_at=NOW)


def test_the_rounds_around_an_incident_decide_the_same_again(cell: str) -> None:
    found = bearer().get(f"/api/v1/replay/incidents/{incident().pk}").json()
    assert found["same"] is True
    assert [one["decisions"][0]["decision"] for one in found["rounds"]] == ["MoveNode"]
    assert (found["rounds"][0]["decisions"][0]["outcome"], found["notes"]) == ("same", [])


def test_another_setting_shows_what_it_would_have_decided(cell: str) -> None:
    found = bearer().get(f"/api/v1/replay/incidents/{incident().pk}?set=suspect_after_s=60").json()
    assert (found["same"], found["settings"]) == (False, {"suspect_after_s": "60"})
    assert [one["outcome"] for one in found["rounds"][0]["decisions"]] == ["gone"]
    assert "not recorded" in found["notes"][0]


def test_a_setting_that_does_not_exist_is_refused_with_near_names(cell: str) -> None:
    path = f"/api/v1/replay/incidents/{incident().pk}"
    refused = bearer().get(f"{path}?set=faults.lost_after_s=60")
    assert refused.status_code == 400
    assert "near: lost_after_s" in refused.content.decode()
    assert bearer().get(f"{path}?set=lost_after_s").status_code == 400


def test_a_round_without_inputs_or_of_another_release_is_refused_by_name(cell: str) -> None:
    row = RecordedRound.objects.latest("id")
    assert bearer().get(f"/api/v1/replay/rounds/{row.pk}").json()["same"] is True
    RecordedRound.objects.update(schema="older", release="0.0.1")
    refused = bearer().get(f"/api/v1/replay/rounds/{row.pk}")
    assert refused.status_code == 409
    assert "recorded by release 0.0.1 and cannot be replayed" in refused.json()["detail"]
    RecordedRound.objects.update(inputs=None)
    assert "were deleted" in bearer().get(f"/api/v1/replay/rounds/{row.pk}").json()["detail"]
    assert bearer().get("/api/v1/replay/rounds/999999").status_code == 404
