"""Quotas, teams and priorities on the command line."""

import json

import pytest

from fleet.deployments.models import Deployment
from fleet.quotas.models import Quota
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def deployment() -> None:
    rows.deployment(cells=2)


def test_a_quota_is_created_listed_and_deleted(switchyard: Switchyard) -> None:
    switchyard("create", "quota", "search", "local.cpu", "4", "--borrow-most", "1")
    switchyard("create", "quota", "search", "local.cpu", "2", "--region", "us-east-1")
    assert Quota.objects.get(region=None).borrow_most == 1
    assert switchyard("get", "quotas", "--where", "team=search").out.splitlines()[1].split()[:5] == [
        "search", "local.cpu", "-", "4", "0",
    ]  # fmt: skip
    deleted = switchyard("delete", "quota", "search:local.cpu:us-east-1", "--yes")
    assert deleted.out == "quota search:local.cpu:us-east-1 is deleted\n"
    assert [row.name for row in Quota.objects.all()] == ["search:local.cpu"]


def test_a_quota_of_a_type_that_does_not_exist_is_refused(switchyard: Switchyard) -> None:
    wrong = switchyard("create", "quota", "search", "inf9", "4")
    assert (wrong.code, "inf9" in wrong.err) == (3, True)


def test_a_deployment_is_given_to_a_team_with_a_priority(switchyard: Switchyard) -> None:
    said = switchyard("quota", "assign", "sim-70b", "--team", "search", "--priority", "7", "--preemptible")
    assert said.out == "deployment sim-70b: team search, priority 7\n"
    row = Deployment.objects.get()
    assert (row.team, row.priority, row.preemptible, row.preempts) == ("search", 7, True, "min")


def test_an_exported_deployment_says_whose_it_is(switchyard: Switchyard) -> None:
    switchyard("quota", "assign", "sim-70b", "--team", "search", "--priority", "0", "--preempts", "need")
    (document,) = [json.loads(switchyard("export", "deployments", "sim-70b", "-o", "json").out)]
    found = document[0] if isinstance(document, list) else document
    assert {name: found["spec"][name] for name in ("team", "priority", "preempts")} == {
        "team": "search", "priority": 0, "preempts": "need",
    }  # fmt: skip
