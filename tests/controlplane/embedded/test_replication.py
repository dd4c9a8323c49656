"""Which database starts, when commits wait for the standby, and what a promotion may lose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.embedded.replication import (
    CAUGHT_UP_BYTES,
    HOST_SILENT_S,
    Commits,
    Database,
    Role,
    Standby,
    Start,
    may_start,
    must_stop,
    wanted_commits,
    why_promotion_may_lose,
)

PRIMARY, STANDBY = Database(Role.PRIMARY, 2), Database(Role.STANDBY)
SYNCHRONOUS, ASYNCHRONOUS = Commits.SYNCHRONOUS, Commits.ASYNCHRONOUS
WELL = Standby(lag_bytes=0, lag_s=0.0, is_synchronous=True, silent_s=1.0)


@pytest.mark.parametrize(
    ("is_standby", "joined", "other", "is_confirmed", "stood_down", "expected"),
    [
        (True, True, None, False, False, Start.START),  # a standby harms nobody
        (True, True, PRIMARY, False, True, Start.START),  # made one by `rejoin`
        (False, False, None, False, False, Start.START),  # the other one was invited and never had anything
        (False, True, STANDBY, False, False, Start.START),
        (False, True, PRIMARY, False, False, Start.FENCED),
        (False, True, PRIMARY, True, False, Start.FENCED),  # whatever a person said: it answers
        (False, True, None, False, False, Start.WAIT),
        (False, True, None, True, False, Start.START),
        (False, True, STANDBY, False, True, Start.FENCED),  # it stands down, and the other is about to be promoted
        (False, True, None, False, True, Start.FENCED),
        (False, True, None, True, True, Start.START),
    ],
)
def test_a_database_that_took_writes_starts_only_if_the_other_takes_none(
    is_standby: bool, joined: bool, other: Database | None, is_confirmed: bool, stood_down: bool, expected: Start
) -> None:
    decision = may_start(
        is_standby=is_standby, other_joined=joined, other=other, is_confirmed=is_confirmed, stood_down=stood_down
    )
    assert decision is expected


def test_of_two_primaries_the_one_promoted_earlier_stops() -> None:
    older, newer = Database(Role.PRIMARY, 1), Database(Role.PRIMARY, 2)
    assert must_stop(older, newer)
    assert not must_stop(newer, older)
    assert not must_stop(older, STANDBY)
    assert not must_stop(Database(Role.STANDBY), newer)
    assert not must_stop(older, None)


@pytest.mark.parametrize(
    ("now", "standby", "missing_s", "alone_after_s", "expected"),
    [
        (ASYNCHRONOUS, WELL, 0.0, 15.0, SYNCHRONOUS),
        (ASYNCHRONOUS, None, 0.0, 15.0, ASYNCHRONOUS),
        (ASYNCHRONOUS, Standby(CAUGHT_UP_BYTES + 1, 9.0, False, 1.0), 0.0, 15.0, ASYNCHRONOUS),
        (ASYNCHRONOUS, Standby(0, 0.0, False, HOST_SILENT_S + 1), 0.0, 15.0, ASYNCHRONOUS),  # a copy in the making
        (SYNCHRONOUS, None, 14.0, 15.0, SYNCHRONOUS),
        (SYNCHRONOUS, None, 16.0, 15.0, ASYNCHRONOUS),
        (SYNCHRONOUS, None, 9999.0, None, SYNCHRONOUS),
        (SYNCHRONOUS, Standby(CAUGHT_UP_BYTES + 1, 9.0, True, 1.0), 0.0, 15.0, SYNCHRONOUS),  # it lags, and is there
    ],
)
def test_commits_wait_for_a_standby_that_is_there_and_so_long_for_one_that_is_not(
    now: Commits, standby: Standby | None, missing_s: float, alone_after_s: float | None, expected: Commits
) -> None:
    assert wanted_commits(now, standby, missing_s=missing_s, alone_after_s=alone_after_s) is expected


@pytest.mark.parametrize(
    ("commits", "contact_s", "alone_after_s", "expected"),
    [
        (SYNCHRONOUS, 86_400.0, None, ""),  # it waits for ever, so cut off it acknowledges nothing
        (SYNCHRONOUS, None, None, ""),
        (SYNCHRONOUS, 1.0, 15.0, "power it off first. If it runs, it goes on alone after 15 s"),
        (SYNCHRONOUS, None, 15.0, "not known when"),
        (ASYNCHRONOUS, 0.0, 15.0, "did not wait for this host"),
        (None, 0.0, None, "did not wait for this host"),
    ],
)
def test_a_promotion_is_without_doubt_only_if_the_primary_never_goes_on_alone(
    commits: Commits | None, contact_s: float | None, alone_after_s: float | None, expected: str
) -> None:
    doubt = why_promotion_may_lose("control-1", commits, contact_s=contact_s, alone_after_s=alone_after_s)
    assert expected in doubt
    assert bool(doubt) == bool(expected)


@given(
    alone_after_s=st.none() | st.floats(0.1, 600.0),
    promoted_s=st.floats(0.0, 3600.0),
    alive_s=st.floats(0.0, 7200.0),
)
def test_two_never_take_writes_without_a_persons_word(
    alone_after_s: float | None, promoted_s: float, alive_s: float
) -> None:
    """The two are cut off from each other, the standby is promoted `promoted_s` later, and the primary runs on for
    `alive_s`: before the promotion and after it."""
    went_alone = wanted_commits(SYNCHRONOUS, None, missing_s=alive_s, alone_after_s=alone_after_s)
    doubt = why_promotion_may_lose("control-1", SYNCHRONOUS, contact_s=promoted_s, alone_after_s=alone_after_s)
    assert doubt or went_alone is SYNCHRONOUS
