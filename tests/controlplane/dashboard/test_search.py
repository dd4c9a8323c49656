"""The search finds everything by name, the whole name first, in a fixed number of queries."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.dashboard.shell import EACH_SHOWN, search
from fleet.rollouts.models import Rollout
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def found(text: str) -> dict[str, list[str]]:
    return {group.title: [match.name for match in group.matches] for group in search(text=text, now=NOW).groups}


@pytest.mark.parametrize(
    ("text", "title", "name"),
    [
        ("region-1-1", "Cells", "deployment-1-region-1-1"),
        ("DEPLOYMENT-1", "Deployments", "deployment-1"),
        ("n-000001", "Nodes", "n-00000100"),
        ("model-1@", "Versions", "model-1@1"),
        ("is lost", "Incidents", "A node of deployment-1-region-1-1 is lost"),
        ("cal.cpu", "Instance types", "local.cpu"),
        ("tenant-1", "Keys", "search"),
        ("sw_0a000001_whatever", "Keys", "search"),
    ],
)
def test_each_kind_is_found_by_a_part_of_its_name(text: str, title: str, name: str) -> None:
    one_more_of_everything(1)
    assert name in found(text)[title]


def test_a_rollout_is_found_by_its_number() -> None:
    one_more_of_everything(1)
    number = Rollout.objects.get().pk
    assert found(str(number))["Rollouts"] == [f"Rollout {number} of deployment-1"]


def test_the_whole_name_comes_first_and_few_of_many_are_shown() -> None:
    for number in (11, 1, *range(100, 107)):
        one_more_of_everything(number)
    assert found("deployment-1")["Deployments"][:2] == ["deployment-1", "deployment-11"]
    assert len(found("deployment-1")["Deployments"]) == EACH_SHOWN


def test_an_empty_text_takes_no_query_and_any_other_one_for_each_kind() -> None:
    one_more_of_everything(1)
    for text, queries in (("", 0), ("1", 8)):
        with CaptureQueriesContext(connection) as captured:
            search(text=text, now=NOW)
        assert len(captured) == queries
