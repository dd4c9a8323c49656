"""Rotation of authorities: none signs before all holders trust it, and none is dropped before its last certificate
expires."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.agents.planner import AuthorityState, AuthorityView, Drop, Promote, plan_rotation

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
LATER, EARLIER = NOW + timedelta(hours=1), NOW - timedelta(hours=1)
CURRENT = AuthorityView(2, AuthorityState.CURRENT, LATER)
NEXT = AuthorityView(3, AuthorityState.NEXT, None)
PROMOTE = Promote(3, "all certificate holders trust it")
DROP = Drop(1, "the last certificate that it signed has expired")


def previous(until: datetime | None) -> AuthorityView:
    return AuthorityView(1, AuthorityState.PREVIOUS, until)


@pytest.mark.parametrize(
    ("authorities", "unaware", "steps"),
    [
        ((CURRENT,), (), ()),
        ((CURRENT,), ("node n-1",), ()),
        ((CURRENT, NEXT), ("node n-1",), ()),
        ((CURRENT, NEXT), (), (PROMOTE,)),
        ((previous(LATER), CURRENT), (), ()),
        ((previous(EARLIER), CURRENT), (), (DROP,)),
        ((previous(None), CURRENT), ("node n-1",), (DROP,)),
        ((previous(LATER), CURRENT, NEXT), (), (PROMOTE,)),
    ],
)
def test_steps(authorities: tuple[AuthorityView, ...], unaware: tuple[str, ...], steps: tuple[object, ...]) -> None:
    assert plan_rotation(authorities, unaware, NOW) == steps
