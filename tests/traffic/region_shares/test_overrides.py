"""Validation and end of overrides."""

from datetime import timedelta
from typing import Any

import pytest

from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet.rows import NOW
from tests.traffic.steered import EAST, WEST, Steered
from traffic.region_shares.models import TrafficOverride
from traffic.region_shares.services.overrides import (
    OVERRIDES_KEPT,
    Terms,
    evacuation_start,
    override_end,
    overrides_expire,
    shares_fix,
    traffic_policy_change,
)

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

TERMS = Terms(duration_s=600, why="maintenance", actor="ada", now=NOW)


@pytest.fixture
def fleet() -> Steered:
    return Steered({EAST: 3, WEST: 3}, {EAST: 6.0, WEST: 6.0})


def evacuate(mode: str = "real", **changes: Any) -> TrafficOverride:
    return evacuation_start(**{"region": EAST, "mode": mode, "confirm": EAST, "terms": TERMS, **changes})


def test_fixed_shares_hold_until_their_time_and_go_back_in_steps(fleet: Steered) -> None:
    fleet.run(20)
    terms = Terms(duration_s=60, why="load test of the west", actor="ada", now=fleet.now)
    shares_fix(deployment="sim-70b", origin=EAST, shares={EAST: 0.2, WEST: 0.8}, terms=terms)
    fleet.run(58)
    assert fleet.row(EAST) == {EAST: 0.2, WEST: 0.8}
    fleet.run(4)
    assert fleet.row(EAST) == {EAST: 0.3, WEST: 0.7}
    order = TrafficOverride.objects.get()
    assert (order.ended_at, order.end_reason) == (order.expires_at, "expired")
    fleet.run(80)
    assert fleet.row(EAST) == {EAST: 1.0}
    events = list(Event.objects.filter(kind__startswith="traffic.shares").order_by("id").values_list("kind", "actor"))
    assert events == [("traffic.shares.begun", "ada"), ("traffic.shares.ended", "switchyard")]


def test_an_evacuated_region_is_no_target_of_any_table(fleet: Steered) -> None:
    fleet.run(20)
    evacuation_start(region=EAST, mode="real", confirm=EAST, terms=Terms(600, "fire", "ada", fleet.now))
    fleet.run(2)
    assert (fleet.row(EAST), fleet.row(WEST)) == ({WEST: 1.0}, {WEST: 1.0})


@pytest.mark.long
def test_a_drill_empties_a_region_in_steps(fleet: Steered) -> None:
    fleet.run(20)
    evacuation_start(region=EAST, mode="drill", confirm=EAST, terms=Terms(600, "practice", "ada", fleet.now))
    fleet.run(2)
    assert fleet.row(EAST) == {EAST: 0.9, WEST: 0.1}
    fleet.run(100)
    assert fleet.row(EAST) == {WEST: 1.0}


@pytest.mark.usefixtures("fleet")
def test_a_younger_order_about_the_same_ends_the_elder() -> None:
    drill = evacuate("drill")
    real = evacuate("real")
    drill.refresh_from_db()
    assert (drill.end_reason, real.ended_at) == (f"superseded by {real.pk}", None)
    assert evacuate(deployment="sim-70b").pk
    assert TrafficOverride.objects.filter(ended_at__isnull=True).count() == 2


@pytest.mark.usefixtures("fleet")
def test_an_order_is_ended_by_hand_once() -> None:
    order = evacuate()
    override_end(override_id=order.pk, actor="bob", now=NOW, why="fire is out")
    order.refresh_from_db()
    assert order.end_reason == "ended by bob: fire is out"
    with pytest.raises(Conflict, match="has ended already"):
        override_end(override_id=order.pk, actor="bob", now=NOW)


@pytest.mark.usefixtures("fleet")
def test_only_orders_whose_time_has_come_expire() -> None:
    order = evacuate()
    assert overrides_expire(now=NOW + timedelta(seconds=599)) == []
    assert overrides_expire(now=NOW + timedelta(seconds=600)) == [order.pk]
    assert overrides_expire(now=NOW + timedelta(seconds=601)) == []


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"region": "mars", "confirm": "mars"}, "region", "exists"),
        ({"mode": "gently"}, "mode", "choice"),
        ({"confirm": "us-east"}, "confirm", "confirm"),
        ({"deployment": "nope"}, "deployment", "exists"),
        ({"terms": Terms(600, " ", "ada", NOW)}, "why", "required"),
        ({"terms": Terms(9, "x", "ada", NOW)}, "duration_s", "range"),
        ({"terms": Terms(8 * 86_400, "x", "ada", NOW)}, "duration_s", "range"),
    ],
)
def test_an_evacuation_that_cannot_be_meant_is_refused(changes: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        evacuate(**changes)
    assert (refused.value.field, refused.value.rule) == (field, rule)
    assert not TrafficOverride.objects.exists()


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"deployment": "nope"}, "deployment", "exists"),
        ({"origin": "mars"}, "origin", "exists"),
        ({"shares": {"mars": 1.0}}, "shares", "exists"),
        ({"shares": {EAST: 0.5}}, "shares", "sum"),
        ({"shares": {EAST: 1.5, WEST: -0.5}}, "shares", "range"),
        ({"origin": WEST}, "shares", "residency"),
    ],
)
def test_shares_that_cannot_be_meant_are_refused(changes: dict[str, Any], field: str, rule: str) -> None:
    traffic_policy_change(deployment="sim-70b", stated={"residency": {WEST: [WEST]}}, actor="ada", now=NOW)
    meant = {"deployment": "sim-70b", "origin": EAST, "shares": {EAST: 0.5, WEST: 0.5}, "terms": TERMS}
    with pytest.raises(InvalidInput) as refused:
        shares_fix(**{**meant, **changes})
    assert (refused.value.field, refused.value.rule) == (field, rule)


@pytest.mark.usefixtures("fleet")
def test_orders_that_ended_long_ago_are_forgotten() -> None:
    old = evacuate()
    override_end(override_id=old.pk, actor="ada", now=NOW)
    copies = TrafficOverride.objects.values("kind", "region_id", "why", "actor", "created_at", "expires_at", "ended_at")
    TrafficOverride.objects.bulk_create(TrafficOverride(**dict(copies[0])) for _ in range(OVERRIDES_KEPT))
    evacuate()
    assert not TrafficOverride.objects.filter(pk=old.pk).exists()
    assert TrafficOverride.objects.filter(ended_at__isnull=False).count() == OVERRIDES_KEPT
