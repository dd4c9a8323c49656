"""What the report makes of results: tables between markers, and nothing elsewhere."""

from typing import Any

from bench.traffic.report import filled, proxies, routing, spread


def rows_of(contender: str, requests: int, first_us: int) -> list[dict[str, Any]]:
    common = {"contender": contender, "count": 300, "seconds": 2.0, "errors": 0, "cpu_s": 0.5, "resident_mib": 9.0}
    first = {"0.5": first_us, "0.99": 2 * first_us}
    return [
        {**common, "kind": "closed", "requests": requests, "events": 0, "first_us": {}},
        {**common, "kind": "rate", "requests": 600, "events": 6000, "first_us": first},
        {**common, "kind": "flood", "requests": 10, "events": 2000, "first_us": {}},
    ]


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    page = "before\n<!-- a -->\nold\n<!-- end of a -->\nafter"

    assert filled(page, "a", r"new \1") == "before\n<!-- a -->\nnew \\1\n<!-- end of a -->\nafter"
    assert filled(page, "b", "new") == page


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0 to 3.0)"
    assert spread([]) == "-"


def test_proxies_are_compared_with_the_cells_themselves_and_the_absent_are_named() -> None:
    rows = rows_of("direct", 20_000, 100) + rows_of("ingress", 10_000, 300) + [{"absent": {"peer": "it is away"}}]

    lines = proxies(rows).splitlines()

    direct, ingress = lines[2], lines[3]
    assert direct.startswith("| direct | 10,000 (10,000 to 10,000) | 1.00 | 300/s | - | - | 1,000 (")
    assert ingress.startswith("| ingress | 5,000 (5,000 to 5,000) | 0.50 | 300/s | 0.20 (0.20 to 0.20) | 0.40 (")
    assert lines[-1] == "Left out: peer: it is away"


def test_a_rule_that_was_not_measured_at_a_rate_has_no_number_there() -> None:
    rows = [
        {"policy": "one", "rate": 60, "p99_ms": 100.0, "slow_factor": 3.0},
        {"policy": "one", "sustained": 80, "bound_ms": 500.0, "slow_factor": 3.0},
        {"policy": "other", "rate": 80, "p99_ms": 200.0, "slow_factor": 3.0},
    ]

    assert routing(rows).splitlines()[2:] == [
        "| one | 100 (100 to 100) | - | - | 80 |",
        "| other | - | 200 (200 to 200) | - | - |",
    ]
