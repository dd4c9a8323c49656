"""Batch work beside real-time requests on virtual time: the same each time, and the rules differ as they should."""

from bench.guest.prefixes import compared
from bench.guest.rules import rule_of
from bench.guest.surge import surge
from bench.guest.world import Cell, Load, Measured

LOAD = Load(batch_from_s=10.0, warm_up_s=20.0, measured_s=20.0)


def measured(rule: str) -> Measured:
    return Cell(rule_of(rule, 64, 256), LOAD, seed=4).run()


def test_a_guest_leaves_real_time_requests_what_no_rule_takes_from_them() -> None:
    alone, without, guest = (measured(rule).ttft.quantile_ms(0.5) for rule in ("alone", "no rule", "guest"))
    assert alone <= guest < 1.3 * alone < 3 * alone < without


def test_a_run_is_the_same_twice() -> None:
    assert measured("guest") == measured("guest")


def test_lines_in_the_order_of_their_prefixes_are_found_more_often_in_the_cache() -> None:
    file_order, ours = compared(600, 120, 64, seed=1)
    assert ours.cached > 1.2 * file_order.cached
    assert ours.tokens_per_s > file_order.tokens_per_s


def test_a_surge_refuses_nobody_for_batch_work() -> None:
    load = Load(rate=0.8, batch_from_s=5.0, warm_up_s=10.0, measured_s=20.0, surge=3.0, surge_at_s=15.0)
    beside, alone = surge("guest", 256, 2, load).refused
    assert beside <= alone
