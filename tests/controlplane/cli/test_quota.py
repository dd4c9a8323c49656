"""Quotas, teams and priorities on the command line."""

import json

import pytest

from fleet.models import Deployment, Quota
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def deployment() -> None:
    rows.deployment(cells=2)


def test_an_empty_list_says_what_fills_it(switchyard: Switchyard) -> None:
    assert "switchyard quota set TEAM TYPE MACHINES" in switchyard("quota", "list").err


def test_a_quota_is_set_listed_and_removed(switchyard: Switchyard) -> None:
    said = switchyard("quota", "set", "search", "local.cpu", "4", "--borrow-most", "1")
    assert said.out == "team search is entitled to 4 local.cpu, and uses 0\n"
    assert Quota.objects.get().borrow_most == 1
    assert switchyard("quota", "list", "--team", "search").out.splitlines()[1].split()[:5] == [
        "search", "local.cpu", "-", "4", "0",
    ]  # fmt: skip
    assert switchyard("quota", "remove", "search", "local.cpu").out == (
        "team search has no quota of local.cpu any more\n"
    )
    assert not Quota.objects.exists()


def test_a_quota_of_a_region_is_set_and_removed_by_itself(switchyard: Switchyard) -> None:
    switchyard("quota", "set", "search", "local.cpu", "4")
    said = switchyard("quota", "set", "search", "local.cpu", "2", "--region", "us-east-1")
    assert said.out == "team search is entitled to 2 local.cpu in us-east-1, and uses 0\n"
    assert switchyard("quota", "remove", "search", "local.cpu", "--region", "us-east-1").out == (
        "team search has no quota of local.cpu in us-east-1 any more\n"
    )
    assert [row.name for row in Quota.objects.all()] == ["search:local.cpu"]


def test_a_quota_of_a_type_that_is_not_there_is_refused(switchyard: Switchyard) -> None:
    wrong = switchyard("quota", "set", "search", "inf9", "4")
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
