"""A viewer with a grant for one deployment runs that one, and no other."""

from typing import Any

import pytest

from fleet.deployments.models import Deployment
from fleet.deployments.planner import UpdatePolicy, policy_as_json
from fleet.rollouts.models import Rollout
from tests.controlplane.access.callers import calls, granted
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.region_shares.models import TrafficOverride

pytestmark = pytest.mark.django_db


def things(name: str) -> dict[str, str]:
    """A deployment with one of everything that belongs to it: what to ask -> path."""
    deployment = rows.deployment(name)
    cell = rows.cell(f"{name}-cell", deployment=deployment)
    version = deployment.model_version
    rollout = Rollout.objects.create(
        deployment=deployment, from_version=version, to_version=version, reason="r", region_order=["us-east-1"],
        policy=policy_as_json(UpdatePolicy()), actor="a", created_at=NOW, state_since=NOW,
    )  # fmt: skip
    order = TrafficOverride.objects.create(
        kind="shares", deployment=deployment, region=rows.region(), why="w", actor="a", created_at=NOW, expires_at=NOW
    )
    return {
        "PATCH": f"deployments/{name}",
        "PATCH policy": f"traffic/policies/{name}",
        "POST drain": f"cells/{cell.id}/drain",
        "POST restart": f"cells/{cell.id}/restart",
        **{f"POST {verb}": f"rollouts/{rollout.pk}/{verb}" for verb in ("pause", "resume", "roll-back", "abort")},
        "POST skip": f"rollouts/{rollout.pk}/skip-bake",
        "POST end": f"traffic/overrides/{order.pk}/end",
    }


def status(client: Any, verb: str, path: str, body: dict[str, Any] | None = None) -> int:
    response = client.generic(
        verb.split(maxsplit=1)[0], f"/api/v1/{path}", _json(body), content_type="application/json"
    )
    return int(response.status_code)


def _json(body: dict[str, Any] | None) -> str:
    return str(body or {}).replace("'", '"')


@pytest.mark.slow
def test_a_grant_opens_what_is_of_its_deployment_and_nothing_of_another() -> None:
    client = calls(granted("ada", "chat"))
    mine, others = things("chat"), things("code")
    assert {verb for verb, path in others.items() if status(client, verb, path) != 403} == set()
    assert {verb for verb, path in mine.items() if status(client, verb, path) in {401, 403, 404}} == set()


@pytest.mark.parametrize("path", ["rollouts", "traffic/overrides", "traffic/evacuations"])
def test_what_a_request_names_in_its_body_counts(path: str) -> None:
    client = calls(granted("ada", "chat"))
    assert status(client, "POST", path, {"deployment": "chat"}) == 400
    assert status(client, "POST", path, {"deployment": "code"}) == 403
    assert status(client, "POST", path, {"deployment": ["chat"]}) == 403
    assert status(client, "POST", path) == 403


def test_somebody_with_a_grant_still_sees_everything() -> None:
    rows.deployment("code")
    assert calls(granted("ada", "chat")).get("/api/v1/deployments/code").status_code == 200
    assert Deployment.objects.count() == 1
