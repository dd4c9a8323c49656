"""Who of those that knock at the agents' door is looked up. A knock without a credential of our form is refused at
once. One with the prefix of a credential that exists is looked up. All others together get a few look-ups a second,
because a credential may be younger than what is known of here; the rest is told to come again.

So what strangers send costs the database next to nothing, and takes no agent's turn. It decides and remembers; the hub
reads the prefixes, the door and the socket ask.
"""

import re
from collections.abc import Callable, Iterable
from enum import Enum
from time import monotonic

from fleet.consumers.token_bucket import TokenBucket

UNKNOWN_PER_S, UNKNOWN_BURST = 20.0, 200.0
"""Look-ups of prefixes that nobody is known to have. The burst is what enrols between two looks at what is new."""
RETRY_AFTER_S = 2
"""By then a new credential is known of."""
_BEARER = re.compile(r"bearer +(sw_([0-9a-f]{8})_[0-9a-f]{48}) *", re.IGNORECASE)


class Knock(Enum):
    REFUSED = "refused"
    LATER = "later"
    LOOKED_UP = "looked up"


class Knocks:
    """What one process knows of credentials without asking the database: their prefixes, which are no secrets."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._prefixes: set[str] = set()
        self._unknown = TokenBucket(per_s=UNKNOWN_PER_S, burst=UNKNOWN_BURST, now=now())

    def learn(self, prefixes: Iterable[str]) -> None:
        """These exist. One that was revoked since is looked up, and refused then."""
        self._prefixes.update(prefixes)

    def judge(self, authorization: str, *, counts: bool = True) -> Knock:
        """What becomes of a knock with this header. One that does not count is judged again before it is looked up."""
        found = _BEARER.fullmatch(authorization)
        if found is None:
            return Knock.REFUSED
        if found[2] in self._prefixes:
            return Knock.LOOKED_UP
        has_room = self._unknown.take(self._now()) if counts else self._unknown.has(self._now())
        return Knock.LOOKED_UP if has_room else Knock.LATER


def credential_of(authorization: str) -> str:
    """The credential in a header that was not refused."""
    found = _BEARER.fullmatch(authorization)
    return found[1] if found else ""
