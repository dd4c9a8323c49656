"""The rows of usage and their bound."""

from engine_agent.cell_proxy.usage_rows import FORGET_AFTER_S, UsageCounts, UsageRows
from engine_agent.protocol.messages import OTHER_TENANTS
from engine_agent.protocol.states import ServingClass

REALTIME = ServingClass.REALTIME


def use_of(rows: UsageRows, tenant: str, now: float, key: str = "", of: ServingClass = REALTIME) -> UsageCounts:
    counts = rows.of(tenant, key, of, now)
    counts.requests += 1
    return counts


def requests_of(rows: UsageRows) -> dict[str, int]:
    return {tenant: row.requests_total for tenant, row in rows.by_tenant().items()}


def test_who_shows_no_key_has_a_row_without_a_name() -> None:
    rows = UsageRows()
    use_of(rows, "", 10.0)
    (row,) = rows.rows()
    assert (row.tenant, row.key, row.serving_class, row.requests_total) == ("", "", "realtime", 1)
    assert rows.by_tenant() == {}


def test_a_tenant_keeps_its_row() -> None:
    rows = UsageRows()
    use_of(rows, "acme", 10.0)
    use_of(rows, "acme", 99.0)
    (row,) = rows.rows()
    assert (row.requests_total, row.since) == (2, 10.0)


def test_keys_and_classes_of_a_tenant_have_rows_of_their_own_that_add_up() -> None:
    rows = UsageRows()
    use_of(rows, "acme", 30.0, "0a").cached_tokens = 5
    use_of(rows, "acme", 20.0, "0b")
    use_of(rows, "acme", 10.0, "0b", ServingClass.BATCH).cached_tokens = 2
    assert [(row.key, row.serving_class) for row in rows.rows()] == [
        ("0a", "realtime"),
        ("0b", "realtime"),
        ("0b", "batch"),
    ]
    acme = rows.by_tenant()["acme"]
    assert (acme.requests_total, acme.cached_tokens_total, acme.since) == (3, 7, 10.0)


def test_beyond_the_bound_tenants_share_a_row_of_each_class() -> None:
    rows = UsageRows(limit=2)
    for name in ("a", "b", "c", "d", "c"):
        use_of(rows, name, 10.0)
    use_of(rows, "e", 10.0, of=ServingClass.BATCH)
    assert requests_of(rows) == {"a": 1, "b": 1, OTHER_TENANTS: 4}
    shared = [(row.serving_class, row.requests_total) for row in rows.rows() if row.tenant == OTHER_TENANTS]
    assert shared == [("realtime", 3), ("batch", 1)]


def test_the_one_that_was_silent_longest_makes_place_and_begins_anew_when_it_returns() -> None:
    rows = UsageRows(limit=2)
    use_of(rows, "a", 10.0)
    use_of(rows, "b", 20.0)
    use_of(rows, "c", 11.0 + FORGET_AFTER_S)
    assert set(rows.by_tenant()) == {"b", "c"}
    use_of(rows, "a", 200.0)
    assert rows.by_tenant()["a"].since == 200.0
    assert set(rows.by_tenant()) == {"c", "a"}


def test_a_row_with_requests_in_flight_is_never_forgotten() -> None:
    rows = UsageRows(limit=1)
    use_of(rows, "a", 10.0).in_flight = 1
    use_of(rows, "b", 500.0)
    assert set(rows.by_tenant()) == {"a", OTHER_TENANTS}
