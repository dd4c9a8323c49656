"""From totals that cells report to the demand that roles are planned for."""

from dataclasses import replace

import pytest

from engine_agent.protocol.states import CellRole
from fleet.planning.roles.counted import CountedCell, demand_between, handover_s

BEFORE = CountedCell(3, CellRole.MIXED, 100, 300_000, 0, 20_000)
AFTER = replace(BEFORE, requests=700, prompt_tokens=2_100_000, completion_tokens=140_000, in_flight=8.0)


def test_what_was_added_between_two_looks_makes_the_demand() -> None:
    demand = demand_between({"a": BEFORE}, {"a": AFTER}, 300.0, None)

    assert demand is not None
    assert (demand.per_s, demand.uncached_tokens, demand.output_tokens, demand.requests) == (2.0, 3000, 200, 600)


def test_tokens_from_caches_are_not_read() -> None:
    demand = demand_between({"a": BEFORE}, {"a": replace(AFTER, cached_tokens=1_200_000)}, 300.0, None)

    assert demand is not None
    assert demand.uncached_tokens == 1000


def test_what_prefill_cells_read_counts_though_it_was_cached_for_who_answered() -> None:
    decode = replace(AFTER, role=CellRole.DECODE, cached_tokens=1_800_000)
    prefill = CountedCell(1, CellRole.PREFILL, read_tokens=0)
    demand = demand_between(
        {"d": replace(BEFORE, role=CellRole.DECODE), "p": prefill},
        {"d": decode, "p": replace(prefill, read_tokens=1_500_000)},
        300.0,
        None,
    )

    assert demand is not None
    assert demand.uncached_tokens == 2500
    assert demand.requests == 600


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        (replace(AFTER, generation=4), 300.0),
        (replace(AFTER, requests=99), 300.0),
        (replace(AFTER, prompt_tokens=0), 300.0),
        (BEFORE, 300.0),
        (AFTER, 0.0),
        (AFTER, 86_400.0),
    ],
)
def test_another_count_no_request_or_too_long_ago_says_nothing(after: CountedCell, seconds: float) -> None:
    assert demand_between({"a": BEFORE}, {"a": after}, seconds, None) is None


def test_a_forecast_grows_what_comes_now_by_a_factor_of_ten_at_most() -> None:
    grown = demand_between({"a": BEFORE}, {"a": AFTER}, 300.0, 16.0)
    wild = demand_between({"a": BEFORE}, {"a": AFTER}, 300.0, 8e6)

    assert grown is not None
    assert grown.expected_per_s == 4.0
    assert wild is not None
    assert wild.expected_per_s == 20.0


def test_a_handover_takes_what_it_took_most_decode_cells() -> None:
    times = (0.010, None, 0.030, 5.0)
    cells = {str(number): replace(AFTER, handover_s=one) for number, one in enumerate(times)}

    assert handover_s(cells) == 0.030
    assert handover_s({"a": AFTER}) is None


def test_a_cell_that_lies_of_itself_moves_little() -> None:
    liar = replace(AFTER, requests=10**12, prompt_tokens=10**18, completion_tokens=10**17)
    reader = CountedCell(1, CellRole.PREFILL)
    before = {**dict.fromkeys("abc", BEFORE), "p": reader}
    after = {"a": AFTER, "b": AFTER, "c": liar, "p": replace(reader, read_tokens=10**18)}
    demand = demand_between(before, after, 300.0, None)

    assert demand is not None
    assert demand.per_s == 12.0, "as much as four cells at most"
    assert (demand.uncached_tokens, demand.output_tokens) == (3000, 200)
