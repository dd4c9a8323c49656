"""What a person may state of markets, and which machines that lets a deployment use."""

from typing import Any

import pytest

from fleet.planning.markets import ANY, InvalidMarkets, Market, Markets, may_use, parse_markets, stored, wanted_by_all

FIRM: Markets = frozenset({Market.RESERVED, Market.ON_DEMAND})
SPOT: Markets = frozenset({Market.SPOT})


def test_markets_are_stored_in_one_order_however_they_were_stated() -> None:
    assert stored(parse_markets(["on_demand", "reserved"])) == ["reserved", "on_demand"]
    assert parse_markets([]) == ANY


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (["spott"], "'spott' is no market; there are: reserved, block, open, on_demand, interruptible, spot"),
        ([["spot"]], r"\['spot'\] is no market"),
        ([1], "1 is no market"),
        (["spot", "spot"], "spot is named twice"),
        ("spot", "markets must be a list of some of: reserved"),
        ({"spot": 1}, "markets must be a list of some of"),
    ],
)
def test_what_is_no_list_of_markets_is_refused(stated: Any, said: str) -> None:
    with pytest.raises(InvalidMarkets, match=said):
        parse_markets(stated)


def test_only_a_machine_of_which_it_is_certain_is_used_where_markets_are_stated() -> None:
    assert all(may_use(ANY, machine) for machine in (ANY, SPOT, FIRM))
    assert all(may_use(FIRM, machine) for machine in (frozenset({Market.RESERVED}), FIRM))
    assert not any(may_use(FIRM, machine) for machine in (SPOT, FIRM | SPOT, ANY))


def test_what_all_want_is_what_each_may_use() -> None:
    assert wanted_by_all([ANY, FIRM, SPOT | {Market.RESERVED}]) == {Market.RESERVED}
    assert wanted_by_all([FIRM, SPOT]) == wanted_by_all([ANY]) == wanted_by_all([]) == ANY
