"""Who holds the clouds: whoever goes on writing the object, and nobody by a guess."""

from datetime import timedelta

import pytest

from fleet.planning.ownership import STALE_AFTER, Verdict, judge_beat, stale_reason
from tests.fleet.planning.fleets import NOW


@pytest.mark.parametrize(
    ("was_written", "there", "verdict"),
    [
        (True, None, Verdict.OWNER),
        (None, None, Verdict.AGAIN),
        (False, None, Verdict.AGAIN),
        (False, "mine", Verdict.OWNER),
        (False, "another's", Verdict.LOST),
    ],
)
def test_a_beat_is_judged_by_what_is_there(was_written: bool | None, there: str | None, verdict: Verdict) -> None:
    assert judge_beat(was_written=was_written, nonce_there=there, nonce_tried="mine") is verdict


def test_without_a_beat_for_long_nothing_may_be_changed() -> None:
    assert stale_reason(None, NOW) == ""
    assert stale_reason(NOW - STALE_AFTER, NOW) == ""
    assert "was last written at" in stale_reason(NOW - STALE_AFTER - timedelta(seconds=1), NOW)
