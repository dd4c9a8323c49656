"""When the fleet's authorities change places. Pure.

A new one is `next`: it is in every bundle and signs nothing. Once all who hold a certificate believe it, it is
`current` and signs. The one before is `previous`, and is believed until the last certificate that it signed has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class AuthorityState(StrEnum):
    NEXT = "next"
    CURRENT = "current"
    PREVIOUS = "previous"


@dataclass(frozen=True, slots=True)
class AuthorityView:
    """`in_use_until`: when the last certificate ends that it signed and that is not revoked; None: there is none."""

    id: int
    state: AuthorityState
    in_use_until: datetime | None


@dataclass(frozen=True, slots=True)
class Promote:
    """The next authority signs from now on."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """This authority is believed no longer."""

    id: int
    reason: str


def plan_rotation(
    authorities: Sequence[AuthorityView], unaware: Sequence[str], now: datetime
) -> tuple[Promote | Drop, ...]:
    """`unaware`: who holds a certificate and did not yet say that it believes all authorities that are in the bundle.

    One that is dropped ends no connection: nobody holds a certificate of it.
    """
    steps: list[Promote | Drop] = []
    for authority in authorities:
        if authority.state is AuthorityState.NEXT and not unaware:
            steps.append(Promote(authority.id, "all who hold a certificate believe it"))
        is_over = authority.in_use_until is None or authority.in_use_until <= now
        if authority.state is AuthorityState.PREVIOUS and is_over:
            steps.append(Drop(authority.id, "the last certificate that it signed has ended"))
    return tuple(steps)
