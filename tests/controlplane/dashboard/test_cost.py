"""The page of cost and power: figures for a million tokens with their sources, idle time and spares apart; and what
admins state there."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from controlplane.dashboard.templatetags.switchyard import quantity, used_share
from fleet.models import Rate
from fleet.planning.rate import Source
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from traffic.models import CellHour, CostShare, TokenFit

pytestmark = pytest.mark.django_db
KIND = {"deployment": "sim-70b", "version": "sim-70b@1", "region": "us-east-1", "instance_type": "p5"}
SOURCES = {"cost_source": Source.RATED, "energy_source": Source.ESTIMATED, "carbon_source": Source.ESTIMATED}


def an_hour(tenant: str = "rufus", **columns: Any) -> None:
    hour = clock.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)
    CellHour.objects.create(
        **{**KIND, "hour": hour, "cost": Decimal(6), "idle": Decimal("2.5"), "energy_uj": 7_200_000_000,
           "idle_uj": 3_600_000_000, "carbon_ug": 9_000_000, "idle_carbon_ug": 4_000_000, "settled": True, **SOURCES,
           **columns}
    )  # fmt: skip
    CostShare.objects.create(
        **{**KIND, "hour": hour, "tenant": tenant, "serving_class": "realtime", "completion_tokens": 500_000,
           "cost": Decimal("3.5"), "energy_uj": 3_600_000_000, "carbon_ug": 5_000_000, **SOURCES, **columns}
    )  # fmt: skip
    CellHour.objects.create(
        instance_type="p5", hour=hour, cost=Decimal(3), idle=Decimal(3), settled=True, cost_source=Source.RATED
    )


def admin() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def test_figures_are_shown_with_idle_time_and_spares_apart_and_say_how_they_are_known() -> None:
    an_hour()
    text = fragment(signed_in(), "/usage/costs/", "costs")
    for expected in (
        "$6.00",
        "$2.50",
        "$3.00",
        "$9.00",
        "$12.00",
        "sim-70b@1",
        "rated",
        "estimated",
        "idle time included",
    ):
        assert expected in text
    assert "4.00" in text  # watt-hours for a million tokens: 2 Wh over half a million
    assert "as=csv" in text


def test_tenants_have_no_idle_time() -> None:
    an_hour()
    text = fragment(signed_in(), "/usage/costs/?group=tenant&span=24h", "costs")
    assert ">rufus<" in text
    assert "$7.00" in text
    assert "without idle time" in text


def test_what_is_unknown_is_no_figure() -> None:
    an_hour(energy_source=Source.UNKNOWN, carbon_source=Source.UNKNOWN)
    text = fragment(signed_in(), "/usage/costs/", "costs")
    assert "rated, unknown, unknown" in text


def test_without_hours_it_says_when_there_will_be_some() -> None:
    text = fragment(signed_in(), "/usage/costs/?span=odd&group=odd", "costs")
    assert "half a minute after a fleet's first full hour" in text


def test_an_admin_states_a_rate_and_withdraws_a_later_one() -> None:
    rows.deployment()
    client = admin()
    body = {"kind": "machine_price", "subject": rows.KIND, "region": "", "market": "spot", "value": "31.46410"}
    assert client.post("/usage/costs/rates/set/", body).status_code == 302
    assert (Rate.objects.get().value, Rate.objects.get().market) == (Decimal("31.4641"), "spot")
    text = fragment(client, "/usage/costs/", "rates")
    for expected in ("machine price", ">spot<", ">31.4641<"):
        assert expected in text
    tokens = {"kind": "prompt_price", "subject": "sim-70b", "value": "0.6"}
    assert client.post("/usage/costs/rates/set/", tokens).status_code == 302
    in_force = Rate.objects.get(kind="prompt_price")
    assert client.post(f"/usage/costs/rates/{in_force.pk}/withdraw/").status_code == 409
    later = Rate.objects.create(
        kind="pue", subject="us-east-1", value=2, valid_from=clock.now() + timedelta(days=1), actor="a",
        created_at=clock.now(),
    )  # fmt: skip
    assert client.post(f"/usage/costs/rates/{later.pk}/withdraw/").status_code == 302
    assert Rate.objects.count() == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234.5, "1\u202f234"), (12.34, "12.3"), (1.234, "1.23"), (Decimal("0.1234"), "0.123"),
     (0.01234, "0.0123"), (None, "\u2013")],
)  # fmt: skip
def test_quantities_have_three_digits_that_say_something(value: Any, shown: str) -> None:
    assert quantity(value) == shown


def test_token_weights_are_shown_with_their_source() -> None:
    assert "No cell is serving" in fragment(signed_in(), "/usage/costs/", "weights")
    rows.cell("c", rows.node("n-a"), rows.node("n-b"))
    assert "estimated" in fragment(signed_in(), "/usage/costs/", "weights")
    TokenFit.objects.create(
        version="sim-70b@1", instance_type=rows.KIND, prompt=125_000, cached=0, completion=1_500_000, step_us=20_000,
        sequence_us=250, prompt_us=125, cached_us=0, sequences=16, samples=400, nodes=3, error=0.02, weight_error=0.01,
        fitted_at=clock.now(),
    )  # fmt: skip
    text = fragment(signed_in(), "/usage/costs/", "weights")
    for expected in ("measured", "12.0", "20.0", "2.00 %", "400"):
        assert expected in text


@pytest.mark.parametrize(
    ("percent", "shown"),
    [("0", "0 %"), ("83.4", "83 %"), ("99.4", "99.4 %"), ("99.97", "99.9 %"), ("100", "100 %"), ("100.01", "100.1 %"),
     ("125.6", "126 %")],
)  # fmt: skip
def test_a_budget_is_used_up_when_it_is_and_not_before(percent: str, shown: str) -> None:
    assert used_share(Decimal(percent)) == shown


def test_a_single_hour_is_seen_in_its_charts() -> None:
    an_hour()
    text = fragment(signed_in(), "/usage/costs/?span=24h", "costs")
    assert text.count("lines+markers") == 5
