"""Tables of exact decisions: who makes room for whom, who does not, and when it is given back."""

import pytest

from fleet.deployments.planner import GrantRule, Preempts, QuotaView
from fleet.quotas.planning.planner import plan_shares
from fleet.reconcile.planning.decisions import GrantCells
from tests.fleet.fleets import KIND, NOW
from tests.fleet.quotas.fleets import SETTINGS, Wants, granted, pool

CHAT = Wants("chat", asked=2, ready=1, priority=6)
PRIORITY, RECLAIM, QUOTA, RETURN = GrantRule.PRIORITY, GrantRule.RECLAIM, GrantRule.QUOTA, GrantRule.RETURN


def batch(asked: int = 4, ready: int = 4, **more: object) -> Wants:
    return Wants("batch", asked=asked, ready=ready, **{"priority": 2, "preemptible": True, **more})  # type: ignore[arg-type]


def test_surplus_of_a_lower_priority_makes_room() -> None:
    assert granted(pool(CHAT, Wants("docs", 4, 4, floor=2, priority=4))) == {"docs": (3, PRIORITY)}


@pytest.mark.parametrize(
    "other",
    [
        Wants("docs", 4, 4, floor=4, priority=4),
        Wants("docs", 4, 4, priority=4),
        Wants("docs", 4, 4, floor=2, priority=6),
        Wants("docs", 4, 4, floor=2, priority=9, preemptible=True),
    ],
    ids=["at its floor", "a number that a person set", "equal priority", "higher priority"],
)
def test_what_may_not_be_taken_stays(other: Wants) -> None:
    assert granted(pool(CHAT, other)) == {}


def test_preemptible_cells_make_room_below_their_floor() -> None:
    assert granted(pool(CHAT, batch())) == {"batch": (3, PRIORITY)}


def test_the_last_cell_of_batch_may_be_taken() -> None:
    assert granted(pool(CHAT, batch(1, 1))) == {"batch": (0, PRIORITY)}


def test_surplus_goes_before_any_floor() -> None:
    wants = (CHAT, batch(), Wants("docs", 4, 4, floor=3, priority=4))
    assert granted(pool(*wants)) == {"docs": (3, PRIORITY)}


def test_a_floor_is_not_touched_while_surplus_comes_one_by_one() -> None:
    lacks_two = Wants("chat", asked=3, ready=1, priority=6)
    assert granted(pool(lacks_two, batch(), Wants("docs", 4, 4, floor=2, priority=4))) == {"docs": (3, PRIORITY)}


def test_the_lowest_priority_goes_first_and_then_who_has_most() -> None:
    low, full = Wants("low", 4, 3, floor=1, priority=1), Wants("full", 4, 4, floor=1, priority=1)
    assert granted(pool(CHAT, Wants("docs", 4, 4, floor=1, priority=4), low, full)) == {"full": (3, PRIORITY)}


@pytest.mark.parametrize(("waited_s", "taken"), [(29.0, {}), (31.0, {"batch": (3, PRIORITY)})])
def test_a_cell_has_to_wait_before_others_make_room(waited_s: float, taken: object) -> None:
    assert granted(pool(Wants("chat", 2, 1, priority=6, waiting_s=waited_s), batch())) == taken


def test_where_machines_are_bought_it_waits_as_long_as_they_take_to_boot() -> None:
    short, long = (Wants("chat", 2, 1, priority=6, waiting_s=waited) for waited in (59.0, 61.0))
    assert granted(pool(short, batch(), free=None)) == {}
    assert granted(pool(long, batch(), free=None)) == {"batch": (3, PRIORITY)}


@pytest.mark.parametrize("there", [{"spare": 1}, {"free": 1}], ids=["a spare", "a machine of the pool"])
def test_nothing_is_taken_while_a_machine_is_there(there: dict[str, int]) -> None:
    assert granted(pool(CHAT, batch(), **there)) == {}  # type: ignore[arg-type]


def test_what_makes_room_already_is_counted() -> None:
    """It may have three, and a fourth is being drained."""
    assert granted(pool(CHAT, batch(granted=3, rule=PRIORITY))) == {}


def test_a_surplus_takes_only_where_its_policy_says_so() -> None:
    wants = {"asked": 3, "ready": 2, "floor": 2, "priority": 6}
    assert granted(pool(Wants("chat", **wants), batch())) == {}  # type: ignore[arg-type]
    assert granted(pool(Wants("chat", preempts=Preempts.NEED, **wants), batch())) == {"batch": (3, PRIORITY)}  # type: ignore[arg-type]


def test_who_takes_nothing_waits() -> None:
    assert granted(pool(Wants("chat", 2, 0, priority=9, preempts=Preempts.NOTHING), batch())) == {}


def test_nothing_is_taken_for_a_cell_that_it_would_not_be_enough_for() -> None:
    large = Wants("chat", asked=1, ready=0, priority=6, size=3)
    assert granted(pool(large, batch(2, 2))) == {}
    assert granted(pool(large, batch(3, 3))) == {"batch": (2, PRIORITY)}


def test_a_large_cell_makes_room_for_several_small_ones() -> None:
    assert granted(pool(Wants("chat", 2, 0, priority=6), batch(2, 2, size=2))) == {"batch": (1, PRIORITY)}


def test_as_many_at_once_as_the_policy_lets_be_unavailable() -> None:
    lacks_three = Wants("chat", asked=3, ready=0, priority=6)
    assert granted(pool(lacks_three, batch(max_unavailable=2))) == {"batch": (2, PRIORITY)}


def test_it_says_who_needs_the_machine_and_who_gives_it() -> None:
    (one,) = plan_shares(pool(CHAT, batch()), SETTINGS, NOW)
    assert isinstance(one, GrantCells)
    assert one.taker == "chat"
    assert one.reason == (
        "chat, priority 6, has machines for 1 of 2 cells in east, and no local.cpu is free: 1 of 4 cells, which have "
        "priority 2, make room"
    )


# --- and back --------------------------------------------------------------------------------------------------------


def taken(granted_s: float, rule: GrantRule = PRIORITY) -> Wants:
    return batch(4, 2, granted=2, rule=rule, granted_s=granted_s)


def test_what_was_taken_is_kept_for_a_while() -> None:
    assert granted(pool(taken(599.0), spare=2)) == {}


def test_then_as_much_comes_back_as_is_free() -> None:
    assert granted(pool(taken(601.0), spare=1)) == {"batch": (3, RETURN)}
    assert granted(pool(taken(601.0), spare=3)) == {"batch": (None, RETURN)}


def test_what_comes_back_step_by_step_waits_for_no_more_than_machines() -> None:
    assert granted(pool(taken(1.0, RETURN), spare=1)) == {"batch": (3, RETURN)}


def test_nothing_comes_back_while_somebody_waits_who_goes_before() -> None:
    waits = Wants("chat", 2, 1, priority=6, preempts=Preempts.NOTHING)
    assert granted(pool(waits, taken(601.0), spare=1)) == {}
    assert granted(pool(waits, taken(601.0), spare=2)) == {}


def test_where_machines_are_bought_all_comes_back_once_nobody_waits() -> None:
    assert granted(pool(taken(601.0), free=None)) == {"batch": (None, RETURN)}


def test_a_limit_that_limits_nothing_ends() -> None:
    assert granted(pool(batch(2, 2, granted=2, rule=PRIORITY, granted_s=601.0))) == {"batch": (None, RETURN)}


# --- quotas ----------------------------------------------------------------------------------------------------------

QUOTAS = (QuotaView("search", KIND, 4), QuotaView("ads", KIND, 2))


def test_a_team_may_have_its_own_and_what_others_leave_idle() -> None:
    search, ads = Wants("s", 6, 5, team="search"), Wants("a", 1, 1, team="ads")
    assert granted(pool(search, ads, free=5, quotas=QUOTAS)) == {"s": (5, QUOTA)}


def test_it_says_what_the_team_has_and_who_has_the_rest() -> None:
    search, ads = Wants("s", 6, 5, team="search"), Wants("a", 1, 1, team="ads")
    (one,) = plan_shares(pool(search, ads, free=5, quotas=QUOTAS), SETTINGS, NOW)
    assert isinstance(one, GrantCells)
    assert one.reason == (
        "team search has 4 of 4 local.cpu and borrows 1; nothing more can be borrowed: ads has 1 of 2"
    )


def test_the_owner_gets_its_own_back_whatever_the_priorities() -> None:
    search, ads = Wants("s", 6, 6, team="search", priority=9), Wants("a", 1, 0, team="ads", priority=0)
    assert granted(pool(search, ads, quotas=QUOTAS)) == {"s": (5, RECLAIM)}


def test_a_team_may_be_bound_in_what_it_borrows() -> None:
    quotas = (QuotaView("search", KIND, 4, borrow_most=1), QuotaView("ads", KIND, 2))
    assert granted(pool(Wants("s", 6, 4, team="search"), free=5, quotas=quotas)) == {"s": (5, QUOTA)}


def test_inside_a_team_the_higher_priority_has_more() -> None:
    high, low = Wants("high", 3, 3, team="search", priority=7), Wants("low", 3, 1, floor=0, team="search", priority=3)
    alone = (QuotaView("search", KIND, 4),)
    assert granted(pool(high, low, free=5, quotas=alone)) == {"low": (1, QUOTA)}


def test_inside_a_priority_each_has_the_same_part() -> None:
    one, two = Wants("one", 8, 0, floor=0, team="search"), Wants("two", 4, 0, floor=0, team="search")
    alone = (QuotaView("search", KIND, 6),)
    assert granted(pool(one, two, free=12, quotas=alone)) == {"one": (4, QUOTA), "two": (2, QUOTA)}


def test_who_has_no_quota_is_bound_by_none() -> None:
    assert granted(pool(Wants("other", 9, 9), Wants("s", 4, 4, team="search"), quotas=QUOTAS)) == {}


def test_borrowed_machines_go_first_where_the_owner_finds_none() -> None:
    """Quotas cover all regions; here the owner's own machines are used elsewhere by a team without a quota."""
    quotas = (QuotaView("search", KIND, 2), QuotaView("ads", KIND, 4))
    search = Wants("s", 4, 4, team="search", priority=6)
    ads = Wants("a", 1, 0, team="ads", priority=4)
    assert granted(pool(search, ads, quotas=quotas)) == {"s": (3, RECLAIM)}


def test_more_of_a_quota_is_had_at_once() -> None:
    limited = Wants("s", 6, 4, team="search", granted=4, rule=QUOTA)
    assert granted(pool(limited, free=5, quotas=QUOTAS)) == {"s": (None, RETURN)}


# --- quotas of regions -----------------------------------------------------------------------------------------------


def here(team: str, machines: int, borrow_most: int | None = None, region: str = "east") -> QuotaView:
    return QuotaView(team, KIND, machines, borrow_most, region)


@pytest.mark.parametrize(
    ("quotas", "may_have"),
    [
        ((here("search", 3),), {"s": (3, QUOTA)}),
        ((here("search", 3, region="west"),), {}),
        ((here("search", 3), QuotaView("search", KIND, 5)), {"s": (3, QUOTA)}),
        ((here("search", 5), QuotaView("search", KIND, 4)), {"s": (4, QUOTA)}),
        ((here("search", 3), here("ads", 2)), {"s": (4, QUOTA)}),
        ((here("search", 3, 0), here("ads", 2)), {"s": (3, QUOTA)}),
        ((here("search", 3), QuotaView("ads", KIND, 9)), {"s": (3, QUOTA)}),
    ],
    ids=[
        "its own of the region", "of another region", "the region allows less", "all regions allow less",
        "it borrows there", "it may not borrow there", "what is lent over all is not lent there",
    ],
)  # fmt: skip
def test_the_least_of_the_region_and_of_all_binds(quotas: tuple[QuotaView, ...], may_have: object) -> None:
    search, ads = Wants("s", 6, 2, team="search"), Wants("a", 1, 1, team="ads")
    assert granted(pool(search, ads, free=5, quotas=quotas)) == may_have


def test_it_says_of_which_region_the_quota_is() -> None:
    search, ads = Wants("s", 6, 5, team="search"), Wants("a", 1, 1, team="ads")
    (one,) = plan_shares(pool(search, ads, free=5, quotas=(here("search", 4), here("ads", 2))), SETTINGS, NOW)
    assert isinstance(one, GrantCells)
    assert one.reason == (
        "team search has 4 of 4 local.cpu in east and borrows 1; nothing more can be borrowed: ads has 1 of 2"
    )


def test_machines_that_a_region_lends_come_back_when_their_owner_there_wants_them() -> None:
    search, ads = Wants("s", 4, 4, team="search", priority=9), Wants("a", 1, 0, team="ads", priority=0)
    assert granted(pool(search, ads, quotas=(here("search", 3), here("ads", 1)))) == {"s": (3, RECLAIM)}


def test_who_owns_over_all_regions_takes_nothing_that_only_a_region_lends() -> None:
    """search borrows from ads in the region; maps is entitled to machines in total, where search borrows none."""
    quotas = (here("search", 2), here("ads", 2), QuotaView("maps", KIND, 1), QuotaView("search", KIND, 9))
    search, maps = Wants("s", 4, 4, team="search", priority=6), Wants("m", 1, 0, team="maps", priority=4)
    assert granted(pool(search, maps, quotas=quotas)) == {}
