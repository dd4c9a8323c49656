"""Faults: how they are asked for, and what they do to a cell."""

import pytest

from engine_agent.engines.sim.faults import (
    BadFault,
    Crash,
    Effects,
    Error,
    Fault,
    Faults,
    Hang,
    Slow,
    Unready,
    WrongAnswer,
    combine_effects,
    parse_fault,
)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"kind": "slow", "factor": 2.5}', Slow(factor=2.5)),
        (b'{"kind": "hang"}', Hang()),
        (b'{"kind": "error"}', Error(ratio=1.0)),
        (b'{"kind": "error", "ratio": 0.25}', Error(ratio=0.25)),
        (b'{"kind": "crash"}', Crash()),
        (b'{"kind": "unready"}', Unready()),
        (b'{"kind": "wrong_answer"}', WrongAnswer()),
    ],
)
def test_every_kind_can_be_asked_for(body: bytes, fault: Fault) -> None:
    assert parse_fault(body) == fault


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not JSON"),
        (b"[]", "object"),
        (b"{}", "`kind`; kind is one of slow, hang"),
        (b'{"kind": "flood"}', "flood.*kind is one of slow, hang"),
        (b'{"kind": "slow"}', "factor"),
        (b'{"kind": "slow", "factor": 0.5}', "factor"),
        (b'{"kind": "slow", "factor": "2"}', "factor"),
        (b'{"kind": "error", "ratio": 1.5}', "ratio"),
        (b'{"kind": "hang", "seconds": 3}', "seconds"),
    ],
)
def test_a_bad_fault_is_refused_by_the_name_of_its_field(body: bytes, named: str) -> None:
    with pytest.raises(BadFault, match=named):
        parse_fault(body)


def test_one_fault_of_a_kind_is_in_force_and_clearing_lifts_all() -> None:
    faults = Faults()
    for fault in (Slow(factor=2), Slow(factor=3), Unready(), Error(ratio=0.5)):
        faults.put(fault)

    assert faults.in_force() == (Slow(factor=3), Unready(), Error(ratio=0.5))
    assert (faults.unready, faults.error_ratio, faults.effects()) == (True, 0.5, Effects(slow_factor=3))
    faults.clear()
    assert faults.in_force() == ()
    assert (faults.unready, faults.error_ratio, faults.effects()) == (False, 0.0, Effects())


def test_who_subscribed_hears_of_every_change() -> None:
    faults, heard = Faults(), []
    faults.subscribe(lambda: heard.append(faults.in_force()))

    faults.put(Hang())
    faults.clear()

    assert heard == [(Hang(),), ()]


def test_a_cell_is_as_slow_as_its_slowest_member_and_hangs_with_any() -> None:
    together = combine_effects([Effects(slow_factor=2), Effects(hang=True), Effects(wrong_answer=True)])

    assert together == Effects(slow_factor=2, hang=True, wrong_answer=True)
    assert combine_effects([]) == Effects()
