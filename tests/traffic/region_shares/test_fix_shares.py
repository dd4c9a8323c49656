"""Fixing shares on the page: preview, override, and errors with their reason."""

from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from tests.controlplane.dashboard.clients import opened_in, signed_in
from tests.rows_of_a_file import rows_of_a_file
from tests.traffic.steered import EAST, WEST, Steered
from traffic.region_shares.models import TrafficOverride

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
PAGE = "/traffic/shares/"
FORM = {"deployment": "sim-70b", "origin": EAST, f"share-{EAST}": "25", f"share-{WEST}": "75"}


@pytest.fixture(scope="module", autouse=True)
def fleet(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with rows_of_a_file(django_db_blocker):
        Steered({EAST: 3, WEST: 3}, {EAST: 15.0, WEST: 12.0}).run(20)
        yield


def test_at_first_it_shows_what_holds_now_and_its_effect() -> None:
    shown = signed_in().get(f"{PAGE}?deployment=sim-70b&origin={EAST}").text
    assert 'value="100"' in shown
    assert "Receives" in shown


def test_the_effect_is_shown_and_nothing_is_changed_yet() -> None:
    shown = signed_in().get(PAGE, FORM).text
    assert "Fix these shares" in shown
    assert "within its cap" in shown
    assert not TrafficOverride.objects.exists()


def test_an_override_holds_for_its_time() -> None:
    response = signed_in().post(PAGE, {**FORM, "minutes": "5", "why": "a test"})
    assert (response.status_code, response.headers["Location"]) == (302, "/traffic/")
    override = TrafficOverride.objects.get()
    assert (override.region_id, override.shares, override.actor) == (EAST, {EAST: 0.25, WEST: 0.75}, "operator")
    assert (override.expires_at - override.created_at).total_seconds() == 300


def test_shares_that_another_tab_fixed_meanwhile_are_not_replaced_unseen() -> None:
    client, typed = signed_in(), {**FORM, "minutes": "5", "why": "a test"}
    opened = opened_in(client.get(PAGE, FORM).text)
    client.post(PAGE, {**typed, "opened": opened})
    refused = client.post(PAGE, {**typed, f"share-{EAST}": "50", f"share-{WEST}": "50", "opened": opened})
    assert refused.status_code == 409
    assert f"ixed shares of sim-70b in {EAST} ({EAST} 25%, {WEST} 75%) were begun by operator" in refused.text
    assert TrafficOverride.objects.count() == 1
    again = client.post(PAGE, {**typed, "opened": opened_in(refused.text)})
    assert (again.status_code, TrafficOverride.objects.count()) == (302, 2)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({f"share-{WEST}": "70"}, "sum to 95 %"),
        ({f"share-{WEST}": "x"}, "not a number"),
        ({f"share-{WEST}": "nan"}, "must sum to 100"),
        ({f"share-{EAST}": "-5", f"share-{WEST}": "105"}, "must be from 0 to 1"),
        ({"deployment": "gone"}, "no deployment"),
        ({"origin": "mars"}, "has no ingress"),
        ({"minutes": "x"}, "it must be from"),
        ({"why": " "}, "Give a reason"),
    ],
)
def test_a_refusal_says_why(other: dict[str, str], expected: str) -> None:
    response = signed_in().post(PAGE, {**FORM, "minutes": "5", "why": "a test", **other})
    assert response.status_code == 409
    assert expected in response.text
    assert not TrafficOverride.objects.exists()
