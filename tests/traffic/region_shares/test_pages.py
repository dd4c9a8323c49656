"""The traffic page: shares by region, and overrides."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import DjangoDbBlocker

from tests.controlplane.dashboard.clients import fragment, opened_in, signed_in
from tests.fleet import rows
from tests.rows_of_a_file import rows_of_a_file
from tests.traffic.steered import EAST, WEST, Steered
from traffic.region_shares.models import TrafficOverride

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture(scope="module")
def steered(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Steered]:
    with rows_of_a_file(django_db_blocker):
        fleet = Steered({EAST: 3, WEST: 3}, {EAST: 15.0, WEST: 12.0})
        fleet.run(20)
        yield fleet


@pytest.fixture
def fleet(steered: Steered) -> Steered:
    return deepcopy(steered)


def test_the_matrix_says_who_serves_whose_requests_and_how_full_they_are(fleet: Steered) -> None:
    fleet.lose(EAST, 2)
    fleet.run(2)
    shown = fragment(signed_in(), "/traffic/", "shares")
    for expected in ("sim-70b", EAST, WEST, "heat-6", "local", "within its cap", "15.", "/10.0"):
        assert expected in shown
    assert "a tested capacity of 10" in fragment(signed_in(), "/traffic/", "shifts")


def test_only_operators_see_links_to_overrides(fleet: Steered) -> None:
    viewer = Client()
    viewer.force_login(User.objects.create_user("viewer"))
    ways = ("/traffic/shares/", f"/traffic/evacuate/{EAST}/")
    assert all(way in fragment(signed_in(), "/traffic/", "shares") for way in ways)
    assert not any(way in fragment(viewer, "/traffic/", "shares") for way in ways)


def test_requests_that_fit_nowhere_and_a_hold_are_shown(fleet: Steered) -> None:
    fleet.lose(EAST, 3)
    fleet.rates[WEST] = 25.0
    fleet.silent |= {EAST, WEST}
    fleet.run(20)
    shown = fragment(signed_in(), "/traffic/", "shares")
    assert "no fresh report" in shown
    assert "held" in shown


def test_an_evacuation_shows_its_effect_first(fleet: Steered) -> None:
    shown = signed_in().get(f"/traffic/evacuate/{EAST}/?mode=real").text
    for expected in (f"Evacuate {EAST}", "Receives", "above its cap", "fit in no region", "to confirm"):
        assert expected in shown
    assert not TrafficOverride.objects.exists()
    drill = signed_in().get(f"/traffic/evacuate/{EAST}/").text
    assert "Start the drill" in drill
    assert "above its cap" not in drill


def test_an_evacuation_needs_the_regions_name_typed(fleet: Steered) -> None:
    form = {"mode": "real", "minutes": "10", "why": "fire", "confirm": "east", "deployment": ""}
    refused = signed_in().post(f"/traffic/evacuate/{EAST}/", form)
    assert refused.status_code == 409
    assert "to confirm" in refused.text
    response = signed_in().post(f"/traffic/evacuate/{EAST}/", {**form, "confirm": EAST})
    assert (response.status_code, response.headers["Location"]) == (302, "/traffic/")
    override = TrafficOverride.objects.get()
    assert (override.actor, override.mode, override.why) == ("operator", "real", "fire")
    assert (override.expires_at - override.created_at).total_seconds() == 600
    shown = fragment(signed_in(), "/traffic/", "overrides")
    assert f"evacuation of {EAST} (all deployments)" in shown
    assert "ends in" in shown


def test_an_evacuation_that_another_tab_began_meanwhile_is_shown_and_not_doubled_unseen(fleet: Steered) -> None:
    client, url = signed_in(), f"/traffic/evacuate/{EAST}/"
    form = {"mode": "real", "minutes": "10", "why": "fire", "confirm": EAST, "deployment": ""}
    form["opened"] = opened_in(client.get(f"{url}?mode=real").text)
    client.post(url, {**form, "mode": "drill"})
    refused = client.post(url, form)
    assert refused.status_code == 409
    assert f"acuation drill of {EAST} (all deployments) was begun by operator while this form was open" in refused.text
    assert "you sent mode real, all deployments, for 10 minutes" in refused.text
    assert 'value="fire"' in refused.text
    form["opened"] = opened_in(refused.text)
    assert (client.post(url, form).status_code, TrafficOverride.objects.count()) == (302, 2)


@pytest.mark.parametrize("minutes", ["0", "-3", "x", "99999", ""])
def test_an_impossible_duration_is_refused(fleet: Steered, minutes: str) -> None:
    form = {"mode": "drill", "minutes": minutes, "why": "w", "confirm": EAST}
    assert signed_in().post(f"/traffic/evacuate/{EAST}/", form).status_code == 409
    assert not TrafficOverride.objects.exists()


def test_an_override_is_ended_from_the_page_once(fleet: Steered) -> None:
    form = {"mode": "drill", "minutes": "5", "why": "w", "confirm": EAST}
    signed_in().post(f"/traffic/evacuate/{EAST}/", form)
    path = f"/traffic/overrides/{TrafficOverride.objects.get().pk}/end/"
    assert signed_in().post(path).status_code == 302
    again = signed_in().post(path)
    assert again.status_code == 409
    assert "has ended already" in again.text


def test_only_signed_in_users_may_act_and_only_by_a_form(fleet: Steered) -> None:
    path = f"/traffic/evacuate/{EAST}/"
    form = {"mode": "real", "minutes": "5", "why": "w", "confirm": EAST}
    assert Client().post(path, form).headers["Location"].startswith("/login/")
    signed_in()
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(User.objects.get(username="operator"))
    assert careful.post(path, form).status_code == 403
    assert signed_in().get("/traffic/overrides/1/end/").status_code == 405
    assert not TrafficOverride.objects.exists()


@pytest.mark.parametrize("path", ["/traffic/evacuate/mars/"])
def test_an_unknown_region_or_override_is_not_found(path: str) -> None:
    assert signed_in().get(path).status_code == 404
    assert signed_in().post("/traffic/overrides/0/end/").status_code == 404


def test_a_region_without_an_ingress_has_nothing_to_evacuate(fleet: Steered) -> None:
    rows.region("eu-west-1")
    response = signed_in().get("/traffic/evacuate/eu-west-1/")
    assert response.status_code == 409
    assert "has no ingress" in response.text
