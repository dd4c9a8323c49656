"""The limits of agents' connections: rates of one peer, database lanes, batched queries, credential lookups, concurrent
hellos, and whether the hub keeps up. Pure except for the lanes. A request without a well-formed credential is rejected
immediately, and one with the prefix of a known credential is looked up. All others share a few lookups a second,
because a credential may be newer than the known prefixes; the rest gets a time to retry. So unauthenticated requests
cost the database almost nothing and delay no agent. After an outage of web the whole fleet reconnects together: only
some hellos run concurrently, and every other agent gets a time to retry at the rate at which hellos complete."""

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
from kernel.secrets import SECRET_PATTERN


class TokenBucket:
    """Limits one peer's messages: `per_s` a second on average, `burst` together."""

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Uses this many tokens. Returns False if fewer are left."""
        if not self.has(now, tokens):
            return False
        self._tokens -= tokens
        return True

    def has(self, now: float, tokens: float = 1.0) -> bool:
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        return self._tokens >= tokens


BATCH = 500
CALLS_APART_S = 0.1
"""Least time from one call to the next, so that agents that connect together share the cost of a call."""

A = TypeVar("A")
R = TypeVar("R")


class Batches(Generic[A, R]):
    """Answers waiting requests together, such as by one query. `call` gets up to `BATCH` requests, oldest first, and
    returns an answer to each in order. An exception as an answer is raised for its request; one that `call` raises, for
    all. While a call runs, and for `CALLS_APART_S` after it began, further requests gather for the next one."""

    def __init__(self, call: Callable[[list[A]], Awaitable[Sequence[R | Exception]]]) -> None:
        self._call = call
        self._waiting: deque[tuple[A, asyncio.Future[R], float]] = deque()
        self._answering: asyncio.Task[None] | None = None
        self._oldest_asked_s: float | None = None
        self._next_call_at_s = 0.0

    @property
    def unanswered_s(self) -> float:
        """How long the oldest request has waited; 0 if none waits."""
        return 0.0 if self._oldest_asked_s is None else monotonic() - self._oldest_asked_s

    async def ask(self, question: A) -> R:
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer, monotonic()))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        while self._waiting:
            if (pause_s := self._next_call_at_s - monotonic()) > 0:
                await asyncio.sleep(pause_s)
            self._next_call_at_s = monotonic() + CALLS_APART_S
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            self._oldest_asked_s = batch[0][2]
            try:
                found = await self._call([question for question, *_ in batch])
            except Exception as error:
                found = [error] * len(batch)
            self._oldest_asked_s = self._waiting[0][2] if self._waiting else None
            for (_, future, _), answer in zip(batch, found, strict=True):
                if future.done():  # the requester is gone
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


CONNECTION_KEPT_S = 600


class Lane(StrEnum):
    """Work with its own thread and connection."""

    REPORTS = "reports"
    """Also the lease of reports: each proves the other."""
    ORDERS = "orders"
    HELLOS = "hellos"
    CREDENTIALS = "credentials"
    CERTIFICATES = "certificates"


def _take_own_connection() -> None:
    """From here on the thread's connection is not from the pool that requests share."""
    own = connections[DEFAULT_DB_ALIAS].copy()
    own.settings_dict["OPTIONS"].pop("pool", None)
    own.settings_dict["CONN_MAX_AGE"] = CONNECTION_KEPT_S
    connections[DEFAULT_DB_ALIAS] = own


def lane_thread(lane: Lane) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"agents-{lane}", initializer=_take_own_connection)


UNKNOWN_PER_S, UNKNOWN_BURST = 20.0, 200.0
"""Lookups of unknown prefixes. The burst covers enrolments between two reads of new prefixes."""
RETRY_AFTER_S = 2
"""A new credential's prefix is known by then."""
_BEARER = re.compile(rf"bearer +(?P<text>{SECRET_PATTERN}) *", re.IGNORECASE)


class CredentialVerdict(Enum):
    REFUSED = "refused"
    LATER = "later"
    LOOKED_UP = "looked up"


class CredentialFilter:
    """What one process knows of credentials without a query: their prefixes, which are not secret."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._prefixes: set[str] = set()
        self._unknown = TokenBucket(per_s=UNKNOWN_PER_S, burst=UNKNOWN_BURST, now=now())

    def add_prefixes(self, prefixes: Iterable[str]) -> None:
        """Adds prefixes of existing credentials. A lookup rejects those revoked later."""
        self._prefixes.update(prefixes)

    def check(self, authorization: str, *, counts: bool = True) -> CredentialVerdict:
        """Returns what to do with a connection with this header. `counts` False: it is checked again before
        the lookup."""
        found = _BEARER.fullmatch(authorization)
        if found is None:
            return CredentialVerdict.REFUSED
        if found["prefix"] in self._prefixes:
            return CredentialVerdict.LOOKED_UP
        has_room = self._unknown.take(self._now()) if counts else self._unknown.has(self._now())
        return CredentialVerdict.LOOKED_UP if has_room else CredentialVerdict.LATER


def credential_of(authorization: str) -> str:
    found = _BEARER.fullmatch(authorization)
    return found["text"] if found else ""


AT_ONCE = 500
"""Concurrent hellos: at the lowest rate still answered within the agents' 10 s."""
OF_EACH = 3
"""Of one credential, so that its holder cannot use the slots of other agents."""
PACE_OVER_S = 5.0
SLOWEST_PER_S = 50.0
SUPPOSED_PER_S = 200.0
"""Assumed rate of a process on a busy machine, until `KNOWN_AFTER` hellos have ended."""
KNOWN_AFTER = 50
CROWD = 100
"""So many hellos within `PACE_OVER_S`, those under way included, are many."""
LATE_BY = 1.5
"""By how much agents may exceed the stated pause, which they vary (`retry_after_s`)."""
LATEST_S = 30.0
"""Longest pause that is stated: much may change by then."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """No slot is free; retry after so many seconds."""

    after_s: float


@dataclass(slots=True)
class HelloSlot:
    """A slot for one hello. A second `end` does nothing."""

    _over: Callable[[], None]
    _ended: bool = field(default=False)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._over()


class HelloQueue:
    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._under_way: Counter[str] = Counter()
        self.count = 0
        self._ends: deque[float] = deque()
        self._next_place_at = now()
        self._line_ends_at = now()
        self.place_freed: Callable[[], None] = lambda: None

    @property
    def has_waiting(self) -> bool:
        """Whether agents that were told to retry because the process was full are still expected."""
        return self.count >= AT_ONCE or self._now() < self._line_ends_at

    @property
    def is_crowded(self) -> bool:
        """Whether many agents connect: work for each of them is then collected for longer."""
        self._forget_old(self._now())
        return self.count + len(self._ends) > CROWD

    def begin(self, credential: str) -> HelloSlot | RetryLater:
        """Admits the holder of this credential, or returns when to retry."""
        if self._under_way.get(credential, 0) >= OF_EACH or self.count >= AT_ONCE:
            after_s = self._next_place_s()
            if self.count >= AT_ONCE:
                comes_at = self._now() + LATE_BY * max(after_s, 1.0)
                self._line_ends_at = max(self._line_ends_at, comes_at)
            return RetryLater(after_s)
        self._under_way[credential] += 1
        self.count += 1
        return HelloSlot(lambda: self._release_hello(credential))

    def _release_hello(self, credential: str) -> None:
        self._under_way[credential] -= 1
        if not self._under_way[credential]:
            del self._under_way[credential]
        self.count -= 1
        self._ends.append(self._now())
        self.place_freed()

    def _next_place_s(self) -> float:
        now = self._now()
        self._forget_old(now)
        self._next_place_at = max(now, self._next_place_at) + 1 / self._pace_per_s(now)
        return min(self._next_place_at - now, LATEST_S)

    def _forget_old(self, now: float) -> None:
        while self._ends and self._ends[0] <= now - PACE_OVER_S:
            self._ends.popleft()

    def _pace_per_s(self, now: float) -> float:
        if len(self._ends) < KNOWN_AFTER:
            return SUPPOSED_PER_S
        return max(SLOWEST_PER_S, len(self._ends) / max(now - self._ends[0], 1.0))


LAG_MOST_S = 1.5
"""Of the event loop. Above it, reports wait in socket buffers for a whole report interval."""
UNANSWERED_MOST_S = 2.0
"""How long a credential or a hello may wait for the database."""
UNSTORED_MOST_S = 3.0
"""How long reports may wait to be stored: as long as one report interval."""
SETTLES_WITHIN_S = 5.0
"""The longest pause of an agent between two tries: all agents that were turned away have retried by then."""
BEHIND_MOST_S, RESTORED_PER_S = 120.0, 0.1
"""After so long behind, the process counts as keeping up until ten times as long without delays has passed: lasting or
repeated overload is not a reconnect storm and must not hide dead nodes."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What a web process measures about itself, in seconds. `turned_away`: agents that were told to retry are still
    expected."""

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
        """Whether the silence of this process's agents counts as evidence, given the latest measurement."""
        passed_s = now_s - (now_s if self._measured_s is None else self._measured_s)
        self._measured_s = now_s
        restored_s = -passed_s if self._is_behind else RESTORED_PER_S * passed_s
        self._excuse_left_s = min(max(self._excuse_left_s + restored_s, 0.0), BEHIND_MOST_S)
        if delays.are_long:
            self._last_delay_s = now_s
        self._is_behind = delays.are_long or (self._is_behind and now_s - self._last_delay_s < SETTLES_WITHIN_S)
        return not self._is_behind or self._excuse_left_s <= 0.0


CAUSES_KEPT = 20_000


class PendingCauses:
    """The request that caused each node's next order, from wake-ups. Only for logs and traces."""

    def __init__(self) -> None:
        self._by_node: OrderedDict[str, Cause] = OrderedDict()

    def record(self, hint: dict[str, Any]) -> None:
        """Keeps the cause in a wake-up, if any."""
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
        """Returns the message with the node's cause, which is used once."""
        cause = self._by_node.pop(node, None)
        return msgspec.structs.replace(message, cause=cause) if cause and isinstance(message, Desired) else message
