"""The page of usage: who used what, what it costs, who is near a budget; and what admins lay down there."""

from datetime import timedelta
from decimal import Decimal

import pytest
from django.contrib.auth.models import User
from django.test import Client

from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from traffic.models import Budget, CellHour, StoredResponse, UsageHour, UsageMonth
from traffic.planning.budget import month_of

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
    narrowed = fragment(signed_in(), "/usage/?tenant=rufus&span=24h", "usage")
    assert ">ada<" not in narrowed
    assert "tenant=rufus" in narrowed


def test_without_usage_it_says_how_to_make_some() -> None:
    text = fragment(signed_in(), "/usage/?span=nonsense", "usage")
    assert "No usage in the last 7 days" in text
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
