"""Whether a first cell is kept from machines, by what its places may have: a table."""

import pytest

from engine_agent.protocol.ingress_messages import Withheld
from fleet.planning.claims import ClaimView, GrantRule
from fleet.planning.hold import withheld_by

NOTHING, QUOTA, MACHINES = Withheld.NOTHING, Withheld.QUOTA, Withheld.MACHINES


def claim(asked: int, granted: int | None = None, rule: GrantRule | None = None) -> ClaimView:
    return ClaimView(asked, 0, granted, rule=rule)


AT_QUOTA, TAKEN_BACK = claim(1, 0, GrantRule.QUOTA), claim(2, 0, GrantRule.RECLAIM)
MADE_ROOM, COMES_BACK = claim(1, 0, GrantRule.PRIORITY), claim(1, 0, GrantRule.RETURN)


@pytest.mark.parametrize(
    ("claims", "by"),
    [
        ((), NOTHING),
        ((claim(0),), NOTHING),
        ((claim(1),), NOTHING),
        ((claim(2, 1, GrantRule.QUOTA),), NOTHING),
        ((claim(0, 0, GrantRule.QUOTA),), NOTHING),
        ((AT_QUOTA,), QUOTA),
        ((TAKEN_BACK,), QUOTA),
        ((MADE_ROOM,), MACHINES),
        ((COMES_BACK,), NOTHING),
        ((AT_QUOTA, claim(1)), NOTHING),
        ((AT_QUOTA, claim(0)), NOTHING),
        ((AT_QUOTA, MADE_ROOM), MACHINES),
    ],
)
def test_a_cell_is_withheld_where_every_place_that_was_set_one_may_have_none(
    claims: tuple[ClaimView, ...], by: Withheld
) -> None:
    assert withheld_by(claims) is by
