"""The books of tenants and their bound."""

from engine_agent.protocol.messages import OTHER_TENANTS
from engine_agent.proxy.tenants import FORGET_AFTER_S, Tenants, TenantUse


def use_of(tenants: Tenants, tenant: str, now: float) -> TenantUse:
    use = tenants.of(tenant, now)
    assert use is not None
    use.requests += 1
    return use


def test_nobody_is_in_no_book() -> None:
    assert Tenants().of("") is None


def test_a_tenant_keeps_its_row() -> None:
    tenants = Tenants()
    use_of(tenants, "acme", 10.0)
    use_of(tenants, "acme", 99.0)
    assert tenants.loads()["acme"].requests_total == 2
    assert tenants.loads()["acme"].since == 10.0


def test_beyond_the_bound_tenants_share_a_row() -> None:
    tenants = Tenants(limit=2)
    for name in ("a", "b", "c", "d", "c"):
        use_of(tenants, name, 10.0)
    assert {name: load.requests_total for name, load in tenants.loads().items()} == {"a": 1, "b": 1, OTHER_TENANTS: 3}


def test_the_one_that_was_silent_longest_makes_place_and_begins_anew_when_it_returns() -> None:
    tenants = Tenants(limit=2)
    use_of(tenants, "a", 10.0)
    use_of(tenants, "b", 20.0)
    use_of(tenants, "c", 11.0 + FORGET_AFTER_S)
    assert set(tenants.loads()) == {"b", "c"}
    use_of(tenants, "a", 200.0)
    assert tenants.loads()["a"].since == 200.0
    assert set(tenants.loads()) == {"c", "a"}


def test_a_tenant_with_requests_in_flight_is_never_forgotten() -> None:
    tenants = Tenants(limit=1)
    use_of(tenants, "a", 10.0).in_flight = 1
    use_of(tenants, "b", 500.0)
    assert set(tenants.loads()) == {"a", OTHER_TENANTS}
