"""Traffic policies over HTTP."""

import pytest

from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = pytest.mark.django_db

URL = "/api/v1/traffic/policies/sim-70b"


def test_a_policy_shows_its_defaults_and_what_was_laid_down() -> None:
    rows.deployment()
    client = bearer()
    assert client.get(URL).json()["revision"] == 0
    changed = client.patch(URL, {"cost": {"us-east-1": 0.5}, "tested_concurrency": 8}, format="json").json()
    assert (changed["cost"], changed["tested_concurrency"], changed["utilisation_cap"]) == ({"us-east-1": 0.5}, 8, 0.8)
    assert (changed["revision"], changed["actor"]) == (1, "operator")
    assert client.get(URL).json() == changed


def test_limits_of_one_request_are_laid_down_one_by_one() -> None:
    rows.deployment()
    client = bearer()
    client.patch(URL, {"request_limits": {"stops": 8}}, format="json")
    changed = client.patch(URL, {"request_limits": {"sequences": 256}}, format="json").json()
    limits = changed["request_limits"]
    assert (limits["stops"], limits["sequences"], limits["tools"]) == (8, 256, 128)


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ({"request_limits": {"sequences": 5000}}, {"request_limits.sequences": "policy"}),
        ({"request_limits": {"choices": 5000}}, {"request_limits.choices": "unknown"}),
        ({"utilisation_cap": 0.95}, {"utilisation_cap": "policy"}),
        ({"residency": {"us-east-1": ["mars"]}}, {"residency.us-east-1": "policy"}),
        ({"spread": 1}, {"spread": "unknown"}),
    ],
)
def test_what_breaks_a_rule_is_named(body: dict[str, object], broken: dict[str, str]) -> None:
    rows.deployment()
    assert rules(bearer().patch(URL, body, format="json")) == broken


def test_a_deployment_that_is_not_there_has_no_policy() -> None:
    assert bearer().patch(URL, {}, format="json").status_code == 404
