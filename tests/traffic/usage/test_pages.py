"""Usage page and cost page: rows, budgets, figures with their sources, and admins' rates."""

import csv
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from controlplane.dashboard.templatetags.switchyard import quantity, used_share
from fleet.capacity.planning.rates import Source
from fleet.regions.models import Rate
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from traffic.responses.models import StoredResponse
from traffic.usage.models import Budget, CellHour, CostShare, TokenFit, UsageHour, UsageMonth
from traffic.usage.planning.counting import month_of

pytestmark = pytest.mark.django_db


def used(tenant: str, tokens: int, back: int = 1) -> None:
    hour = clock.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=back)
    UsageHour.objects.create(
        tenant=tenant, key="0a0a", deployment="sim-70b", serving_class="realtime", hour=hour, requests=1,
        prompt_tokens=tokens, charged=Decimal("12.5"), machine_cost=Decimal("0.75"),
    )  # fmt: skip


def admin() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def test_tenants_are_shown_by_what_they_used_and_cost_with_their_budgets() -> None:
    used("rufus", 1200)
    used("ada", 5000)
    Budget.objects.create(tenant="rufus", unit="tokens", limit=2000, actor="a", changed_at=clock.now(), level=50)
    UsageMonth.objects.create(tenant="rufus", month=month_of(clock.now()), tokens=1200)
    hour = clock.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    CellHour.objects.create(
        deployment="sim-70b", instance_type="t", hour=hour, cost=Decimal(4), idle=Decimal("2.5"), settled=True
    )
    text = fragment(signed_in(), "/usage/", "usage")
    assert text.index(">ada<") < text.index(">rufus<")
    for expected in ("6\u202f200", "$25.00", "$4.00", "$2.50", "60 %", "Tokens of sim-70b cost nothing", "as=csv"):
        assert expected in text
    assert " past 50 %" in fragment(signed_in(), "/usage/", "usage-budgets")
    narrowed = fragment(signed_in(), "/usage/?tenant=rufus&range=1d", "usage")
    assert ">ada<" not in narrowed
    assert "tenant=rufus" in narrowed


def test_without_usage_it_says_how_to_make_some() -> None:
    text = fragment(signed_in(), "/usage/?range=nonsense", "usage")
    assert "No usage in this period of 7 days" in text
    assert "tokens are free" in fragment(signed_in(), "/usage/costs/", "rates")


def test_kept_responses_are_shown_by_tenant() -> None:
    assert "No responses are stored" in fragment(signed_in(), "/usage/", "usage-responses")
    for tenant, size in (("ada", 2048), ("rufus", 5 * 1024 * 1024)):
        StoredResponse.objects.create(
            tenant=tenant, model="m", state="completed", input=b"[]", response=b"{}", bytes=size,
            created_at=clock.now(), ended_at=clock.now(),
        )  # fmt: skip
    text = fragment(signed_in(), "/usage/", "usage-responses")
    assert text.index(">rufus<") < text.index(">ada<")
    for expected in ("2.0\xa0KB", "5.0\xa0MB", "at most 20\u202f000 of 1.0\xa0GB"):
        assert expected in text
    narrowed = fragment(signed_in(), "/usage/?tenant=ada", "usage-responses")
    assert ">rufus<" not in narrowed


def test_an_admin_sets_budgets_and_takes_them_back() -> None:
    rows.deployment()
    client = admin()
    of_a_tenant = {"tenant": "rufus", "unit": "usd", "hard_stop": "yes"}
    of_machines = {"deployment": "sim-70b", "unit": "usd"}
    for whose, limit in ((of_a_tenant, "10"), (of_a_tenant, "20"), (of_machines, "20"), ({"unit": "usd"}, "30")):
        assert client.post("/usage/budgets/set/", {**whose, "limit": limit}).status_code == 302
    limits = {(row.subject, row.hard_stop): row.limit for row in Budget.objects.all()}
    assert limits == {
        ("tenant rufus (usd)", True): 20, ("machines of sim-70b", False): 20, ("machines of the fleet", False): 30
    }  # fmt: skip
    assert client.post("/usage/budgets/set/", {"tenant": "ada", "hard_stop": "yes"}).status_code == 409
    hour = clock.now().replace(minute=0, second=0, microsecond=0)
    CellHour.objects.create(deployment="sim-70b", instance_type="t", hour=hour, spent=25 * 1_000_000 * 3_600_000)
    text = fragment(client, "/usage/", "usage-budgets")
    for expected in ("machines of the fleet", "over", "25.00 of 20.00 USD", "125 %", "83 %"):
        assert expected in text
    for row in Budget.objects.all():
        client.post(f"/usage/budgets/{row.pk}/remove/")
    assert not Budget.objects.exists()


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
    assert "4.00" in text  # watt-hours per million tokens: 2 Wh for half a million
    assert "as=csv" in text


def test_tenants_have_no_idle_time() -> None:
    an_hour()
    text = fragment(signed_in(), "/usage/costs/?group=tenant&range=1d", "costs")
    assert ">rufus<" in text
    assert "$7.00" in text
    assert "without idle time" in text


def test_what_is_unknown_is_no_figure() -> None:
    an_hour(energy_source=Source.UNKNOWN, carbon_source=Source.UNKNOWN)
    text = fragment(signed_in(), "/usage/costs/", "costs")
    assert "rated, unknown, unknown" in text


def test_without_hours_it_says_when_there_will_be_some() -> None:
    text = fragment(signed_in(), "/usage/costs/?range=odd&group=odd", "costs")
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
    text = fragment(signed_in(), "/usage/costs/?range=1d", "costs")
    assert text.count("lines+markers") == 5


def csv_of(url: str) -> list[list[str]]:
    response: Any = signed_in().get(url)
    return list(csv.reader(b"".join(response.streaming_content).decode().splitlines()))


def test_usage_is_sorted_found_and_exported_beyond_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.dashboard.lists.ROWS_SHOWN", 1)
    for tenant, tokens in (("ada", 10), ("=rufus", 30), ("bob", 20)):
        used(tenant, tokens)
    first = fragment(signed_in(), "/usage/?sort=tenant&q=B", "usage").split("By tenant")[-1]
    assert (">bob<" in first, ">ada<" in first) == (True, False)
    assert "sort=tenant&amp;page=2" in fragment(signed_in(), "/usage/?sort=tenant", "usage")
    assert [line[0] for line in csv_of("/usage/?format=csv&sort=-prompt-tokens")] == ["Tenant", "'=rufus", "bob", "ada"]
    assert csv_of("/usage/?format=csv&list=deployments-")[1][:2] == ["sim-70b", "60"]


def test_costs_are_sorted_found_and_exported_by_their_groups() -> None:
    an_hour("ada")
    other = CostShare.objects.get()
    other.pk, other.tenant, other.cost = None, "rufus", Decimal(1)
    other.save()
    url = "/usage/costs/?group=tenant,class"
    assert ">rufus<" not in fragment(signed_in(), f"{url}&q=AD", "costs").split("<table>")[-1]
    heading, *lines = csv_of(f"{url}&sort=cost&format=csv")
    assert (heading[:3], [line[:2] for line in lines]) == (
        ["Tenant", "Class", "Tokens"],
        [["rufus", "realtime"], ["ada", "realtime"]],
    )
    assert "Idle" in csv_of("/usage/costs/?format=csv")[0]
