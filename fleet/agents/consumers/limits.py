"""A limit of a rate. Pure: the caller brings the time.

Answers many who wait with one call, such as one query. While a call is under way others gather for the next one, so
a crowd costs a few calls and somebody alone waits for none.

The threads that talk to PostgreSQL for agents, each with a connection that no pool gives and no request can take.

Who of those that knock at the agents' door is looked up. A knock without a credential of our form is refused at
once. One with the prefix of a credential that exists is looked up. All others together get a few look-ups a second,
because a credential may be younger than what is known of here; the rest is told to come again.

So what strangers send costs the database next to nothing, and takes no agent's turn. It decides and remembers; the hub
reads the prefixes, the door and the socket ask.

How many agents introduce themselves at once, and when the others shall come again.

After web was away the whole fleet stands before it. Each introduction costs some milliseconds of one thread, and who
has waited for too long gives up and begins anew: so only some are let in, and everybody else gets a place in a line,
given out at the pace at which introductions end. It decides and remembers; the socket asks and answers.

State of the hub: whether it keeps up with its agents, and which request caused each node's next order.
"""

import asyncio
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from time import monotonic
from typing import Any, Generic, TypeVar

import msgspec
from django.db import DEFAULT_DB_ALIAS, connections

from engine_agent.protocol.messages import Cause, Desired, DownMessage


class TokenBucket:
    """Limits one peer's messages: `per_s` a second on average, `burst` at once."""

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Use this many tokens; False if there are not so many left."""
        if not self.has(now, tokens):
            return False
        self._tokens -= tokens
        return True

    def has(self, now: float, tokens: float = 1.0) -> bool:
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        return self._tokens >= tokens


BATCH = 500

A = TypeVar("A")
R = TypeVar("R")


class Batches(Generic[A, R]):
    """`call` gets up to `BATCH` questions, oldest first, and returns an answer to each, in their order. An answer that
    is an exception is raised where it was asked for; one that `call` raises is that of all."""

    def __init__(self, call: Callable[[list[A]], Awaitable[Sequence[R | Exception]]]) -> None:
        self._call = call
        self._waiting: deque[tuple[A, asyncio.Future[R], float]] = deque()
        self._answering: asyncio.Task[None] | None = None
        self._oldest_asked_s: float | None = None

    @property
    def unanswered_s(self) -> float:
        """How long the oldest question has waited for its answer; 0 if none waits."""
        return 0.0 if self._oldest_asked_s is None else monotonic() - self._oldest_asked_s

    async def ask(self, question: A) -> R:
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer, monotonic()))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            self._oldest_asked_s = batch[0][2]
            try:
                found = await self._call([question for question, *_ in batch])
            except Exception as error:
                found = [error] * len(batch)
            self._oldest_asked_s = self._waiting[0][2] if self._waiting else None
            for (_, future, _), answer in zip(batch, found, strict=True):
                if future.done():  # who asked is gone
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


CONNECTION_KEPT_S = 60


class Lane(StrEnum):
    """What has a thread and a connection of its own."""

    REPORTS = "reports"
    """And the lease that says that they are written: one proves the other."""
    ORDERS = "orders"
    HELLOS = "hellos"
    CREDENTIALS = "credentials"
    CERTIFICATES = "certificates"


def _take_own_connection() -> None:
    """The calling thread's connection is its own from here on, and none of the pool that requests share."""
    own = connections[DEFAULT_DB_ALIAS].copy()
    own.settings_dict["OPTIONS"].pop("pool", None)
    own.settings_dict["CONN_MAX_AGE"] = CONNECTION_KEPT_S
    connections[DEFAULT_DB_ALIAS] = own


def lane_thread(lane: Lane) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"agents-{lane}", initializer=_take_own_connection)


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


AT_ONCE = 500
"""Under way; at the slowest pace still within the 10 s that an agent waits for an answer."""
OF_EACH = 3
"""Of one credential: whoever holds one shall not hold the places of others."""
PACE_OVER_S = 5.0
SLOWEST_PER_S = 50.0
SUPPOSED_PER_S = 200.0
"""Until `KNOWN_AFTER` have ended: what one process does on a busy machine."""
KNOWN_AFTER = 50
LATE_BY = 1.5
"""How much later than stated an agent may come, which varies its pause (`retry_after_s`)."""
LATEST_S = 30.0
"""Nobody is told to wait for longer: by then much has changed."""


@dataclass(frozen=True, slots=True)
class ComeAgain:
    """There is no room; there will be after so many seconds."""

    after_s: float


@dataclass(slots=True)
class Introduction:
    """One that was let in. A second `end` does nothing."""

    _over: Callable[[], None]
    _ended: bool = field(default=False)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._over()


class Introductions:
    """Those under way in one web process, and the line before it."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._under_way: Counter[str] = Counter()
        self.count = 0
        """Under way now."""
        self._ends: deque[float] = deque()
        self._next_place_at = now()
        self._line_ends_at = now()

    @property
    def has_line(self) -> bool:
        """Whether agents were told to come again because the process was full, and some of them are still to come."""
        return self.count >= AT_ONCE or self._now() < self._line_ends_at

    def begin(self, credential: str) -> Introduction | ComeAgain:
        """Let in whoever shows this credential, or say when to come again."""
        if self._under_way.get(credential, 0) >= OF_EACH or self.count >= AT_ONCE:
            after_s = self._next_place_s()
            if self.count >= AT_ONCE:
                comes_at = self._now() + LATE_BY * max(after_s, 1.0)
                self._line_ends_at = max(self._line_ends_at, comes_at)
            return ComeAgain(after_s)
        self._under_way[credential] += 1
        self.count += 1
        return Introduction(lambda: self._end(credential))

    def _end(self, credential: str) -> None:
        self._under_way[credential] -= 1
        if not self._under_way[credential]:
            del self._under_way[credential]
        self.count -= 1
        self._ends.append(self._now())

    def _next_place_s(self) -> float:
        now = self._now()
        while self._ends and self._ends[0] <= now - PACE_OVER_S:
            self._ends.popleft()
        self._next_place_at = max(now, self._next_place_at) + 1 / self._pace_per_s(now)
        return min(self._next_place_at - now, LATEST_S)

    def _pace_per_s(self, now: float) -> float:
        if len(self._ends) < KNOWN_AFTER:
            return SUPPOSED_PER_S
        return max(SLOWEST_PER_S, len(self._ends) / max(now - self._ends[0], 1.0))


LAG_MOST_S = 1.5
"""Of the event loop: longer, and reports wait in socket buffers for as long as a report's interval."""
UNANSWERED_MOST_S = 2.0
"""How long a credential or a hello may wait for the database."""
UNSTORED_MOST_S = 3.0
"""How long reports may wait to be stored: one report is missed then."""
SETTLES_WITHIN_S = 5.0
"""The longest pause of an agent between two tries: who was turned away has come again by then."""
BEHIND_MOST_S, RESTORED_PER_S = 120.0, 0.1
"""After so long it counts as keeping up, until that is restored by ten times as long without delays: overload that
lasts or comes again and again is no storm, and must not hide dead nodes."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What a web process measures of itself, in seconds. `turned_away`: agents were told to come again, and the last
    of them is still to come."""

    lag_s: float = 0.0
    unanswered_s: float = 0.0
    unstored_s: float = 0.0
    turned_away: bool = False

    @property
    def are_long(self) -> bool:
        return (
            self.turned_away
            or self.lag_s > LAG_MOST_S
            or self.unanswered_s > UNANSWERED_MOST_S
            or self.unstored_s > UNSTORED_MOST_S
        )


class Backlog:
    def __init__(self) -> None:
        self._is_behind = False
        self._last_delay_s = 0.0
        self._measured_s: float | None = None
        self._excuse_left_s = BEHIND_MOST_S

    def keeps_up(self, delays: Delays, now_s: float) -> bool:
        """Whether the silence of an agent of this process counts, given the newest measurement."""
        passed_s = now_s - (now_s if self._measured_s is None else self._measured_s)
        self._measured_s = now_s
        restored_s = -passed_s if self._is_behind else RESTORED_PER_S * passed_s
        self._excuse_left_s = min(max(self._excuse_left_s + restored_s, 0.0), BEHIND_MOST_S)
        if delays.are_long:
            self._last_delay_s = now_s
        self._is_behind = delays.are_long or (self._is_behind and now_s - self._last_delay_s < SETTLES_WITHIN_S)
        return not self._is_behind or self._excuse_left_s <= 0.0


# Which request caused each node's next order, for logs and traces.

CAUSES_KEPT = 20_000


class PendingCauses:
    """The request that caused each node's next order, as wake-ups state it. Only for logs and traces."""

    def __init__(self) -> None:
        self._by_node: OrderedDict[str, Cause] = OrderedDict()

    def record(self, hint: dict[str, Any]) -> None:
        """Keep the cause that a wake-up states, if any."""
        stated = hint.get("cause")
        if not isinstance(stated, dict) or not stated.get("request_id"):
            return
        cause = Cause(str(stated["request_id"])[:64], str(stated.get("traceparent", ""))[:64])
        for node in hint.get("nodes", ()):
            self._by_node[str(node)] = cause
            self._by_node.move_to_end(str(node))
        while len(self._by_node) > CAUSES_KEPT:
            self._by_node.popitem(last=False)

    def attach(self, node: str, message: DownMessage) -> DownMessage:
        """The message with the node's cause, which is used up by it."""
        cause = self._by_node.pop(node, None)
        return msgspec.structs.replace(message, cause=cause) if cause and isinstance(message, Desired) else message
