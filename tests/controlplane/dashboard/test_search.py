"""The search finds objects, pages and actions by name, the whole name first, in a fixed number of queries."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.dashboard.shell import EACH_SHOWN, KINDS, Group, search
from fleet.rollouts.models import Rollout
from kernel.access import Access, Role
from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


OPERATOR = Access(Role.OPERATOR)


def found(text: str, access: Access = OPERATOR) -> dict[str, list[str]]:
    return {group.title: [match.name for match in group.matches] for group in groups(text, access)}


def groups(text: str, access: Access = OPERATOR) -> tuple[Group, ...]:
    return search(text=text, now=NOW, access=access).groups


def actions(text: str, access: Access = OPERATOR) -> list[tuple[str, str, str]]:
    """Name, address and state of the actions that a text finds."""
    return [
        (match.name, match.url, match.state)
        for group in groups(text, access)
        if group.title == "Actions"
        for match in group.matches
    ]


@pytest.mark.parametrize(
    ("text", "title", "name"),
    [
        ("region-1-1", "Cells", "deployment-1-region-1-1"),
        ("DEPLOYMENT-1", "Deployments", "deployment-1"),
        ("n-000001", "Nodes", "n-00000100"),
        ("model-1@", "Versions", "model-1@1"),
        ("is lost", "Incidents", "A node of deployment-1-region-1-1 is lost"),
        ("cal.cpu", "Instance types", "local.cpu"),
        ("m-00000001", "Machines", "m-00000001"),
        ("gion-1", "Regions", "region-1"),
        ("model-1", "Models", "model-1"),
        ("build-1", "Engine builds", "build-1"),
        ("org/model-1", "Imports", "hf://org/model-1@main"),
        ("tenant-1", "Batches", "batch_00000000000000000000000000000001"),
        ("audi", "Pages", "Audit"),
        ("new mod", "Actions", "New model"),
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


def test_an_action_and_a_name_lead_to_its_form_with_the_reason() -> None:
    one_more_of_everything(0)
    cell = "deployment-0-region-0-1"
    assert actions(f"drain {cell}") == [(f"Drain {cell}", f"/cells/{cell}/ask/drain/", "")]
    assert actions(f"Drain {cell}: noisy & hot")[0][1] == f"/cells/{cell}/ask/drain/?why=noisy+%26+hot"
    assert actions("deep check n-00000000")[0][1] == "/nodes/n-00000000/ask/check/"
    assert actions("evacuate region-0") == [("Evacuate region-0", "/traffic/evacuate/region-0/", "")]
    assert [name.partition(" rollout")[0] for name, *_ in actions("promote deployment-0")] == ["Resume", "Skip bake"]


def test_an_action_that_is_impossible_now_says_why_and_leads_to_the_object() -> None:
    rows.cell("c-1", state="starting")
    assert actions("drain c-1") == [("Drain c-1", "/cells/c-1/", "not now")]


def test_the_beginning_of_an_action_asks_for_a_name() -> None:
    assert ("Drain …", "/search/?q=drain+", "") in actions("dra")


def test_viewers_are_offered_no_action_and_grants_only_theirs() -> None:
    one_more_of_everything(0)
    rows.cell("sim-70b-us-east-1-1")
    assert actions("drain -1") != []
    assert actions("drain -1", Access(Role.VIEWER)) == []
    assert actions("dra", Access(Role.VIEWER)) == []
    granted = Access(Role.VIEWER, {"sim-70b": Role.OPERATOR})
    assert [name for name, *_ in actions("drain -1", granted)] == ["Drain sim-70b-us-east-1-1"]
    assert "Pages" not in found("audit", Access(Role.VIEWER))


@pytest.mark.parametrize("text", ["%", "<script>", "1" * 30, "drain " + "x" * 200, ":", "drain :why", "\u0663"])
def test_any_text_is_only_a_text(text: str) -> None:
    one_more_of_everything(0)
    assert signed_in().get("/search/", {"q": text}).status_code == 200


def test_an_empty_text_takes_no_query_and_any_other_one_for_each_kind() -> None:
    one_more_of_everything(1)
    for text, queries in (("", 0), ("1", len(KINDS))):
        with CaptureQueriesContext(connection) as captured:
            search(text=text, now=NOW, access=OPERATOR)
        assert len(captured) == queries
