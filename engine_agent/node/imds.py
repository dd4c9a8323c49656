"""Asks a machine of EC2 what its cloud says of it, by IMDSv2 alone: an interruption of spot, a recommendation to
rebalance, scheduled maintenance. It hears of these even while the control plane's own calls to the cloud fail.

That there is nothing is the usual answer. Whatever else goes wrong is said once and tried again; what is not known is
reported as not known, never as nothing.
"""

import asyncio
import logging
import os
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException

import msgspec

from engine_agent.protocol.messages import MachineNotice
from engine_agent.protocol.states import MachineNoticeKind

CLOUD_VARIABLE = "SWITCHYARD_CLOUD"
AWS = "aws"
ADDRESS = ("169.254.169.254", 80)
ASK_EVERY_S = 4.0
JITTER_S = 2.0
"""Five seconds on average, as AWS advises."""
LIMIT_S = 2.0
"""For each question: the service is on the machine's own host."""
TOKEN_LIVES_S = 6 * 3600
TOKEN_AGAIN_S = 3600.0
BODY_MOST = 64 * 1024
EVENTS_MOST = 100
SPOT, REBALANCE, MAINTENANCE = (
    "spot/instance-action",
    "events/recommendations/rebalance",
    "events/maintenance/scheduled",
)
ENDS = ("retire", "stop")
"""In the code of an event after which the machine is not there any more."""
OK, NO_TOKEN, NOTHING_THERE = 200, 401, 404

log = logging.getLogger(__name__)


class NotKnown(Exception):
    """The metadata service did not say it; the text says how."""


class _Action(msgspec.Struct, frozen=True):
    action: str
    time: str


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    code: str
    state: str
    not_before: str


class Metadata:
    """The metadata service of this machine. Calls block, each for `LIMIT_S` at most between two bytes."""

    def __init__(self, address: tuple[str, int] = ADDRESS) -> None:
        self._address = address
        self._token, self._token_until_s = "", 0.0

    def notices(self, now_s: float) -> tuple[MachineNotice, ...]:
        """What it says now. `now_s`: of any clock that only grows.

        Raises:
            NotKnown: one of the answers did not come, or makes no sense.
        """
        return notices_of(*(self._read(path, now_s) for path in (SPOT, REBALANCE, MAINTENANCE)))

    def _read(self, path: str, now_s: float) -> bytes:
        """Empty: there is nothing of the kind."""
        status, body = self._get(path, now_s)
        if status == NO_TOKEN:  # it ended before its time, as when the machine was stopped and started
            self._token = ""
            status, body = self._get(path, now_s)
        if status == NOTHING_THERE:
            return b""
        if status != OK:
            raise NotKnown(f"{path} answers {status}")
        return body

    def _get(self, path: str, now_s: float) -> tuple[int, bytes]:
        return self._ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._current_token(now_s)})

    def _current_token(self, now_s: float) -> str:
        if not self._token or now_s >= self._token_until_s:
            lives = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIVES_S)}
            status, body = self._ask("PUT", "/latest/api/token", lives)
            if status != OK or not body.isascii() or not body.decode().isprintable():
                raise NotKnown(f"it gives no token: {status}")
            self._token, self._token_until_s = body.decode(), now_s + TOKEN_AGAIN_S
        return self._token

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        connection = HTTPConnection(*self._address, timeout=LIMIT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read(BODY_MOST + 1)
        except (OSError, HTTPException, ValueError) as error:
            raise NotKnown(f"{path} does not answer: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if len(body) > BODY_MOST:
            raise NotKnown(f"{path} answers more than {BODY_MOST} bytes")
        return answer.status, body


def notices_of(spot: bytes, rebalance: bytes, maintenance: bytes) -> tuple[MachineNotice, ...]:
    """What the three documents mean, empty ones nothing; of each kind the one that ends first. Pure.

    Raises:
        NotKnown: one is not what AWS documents.
    """
    found: list[MachineNotice] = []
    try:
        if spot:
            action = msgspec.json.decode(spot, type=_Action)
            found.append(MachineNotice(MachineNoticeKind.INTERRUPTION, _seconds(datetime.fromisoformat(action.time))))
        if rebalance:
            msgspec.json.decode(rebalance, type=dict[str, str])
            found.append(MachineNotice(MachineNoticeKind.REBALANCE))
        events = msgspec.json.decode(maintenance, type=list[_Event]) if maintenance else []
        found += [_scheduled(event) for event in events[:EVENTS_MOST] if event.state == "active"]
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise NotKnown(f"it says what makes no sense: {str(error)[:200]}") from error
    first: dict[MachineNoticeKind, MachineNotice] = {}
    for notice in sorted(found, key=lambda notice: (notice.ends_at is None, notice.ends_at or 0.0)):
        first.setdefault(notice.kind, notice)
    return tuple(first.values())


def _scheduled(event: _Event) -> MachineNotice:
    ends = any(word in event.code for word in ENDS)
    kind = MachineNoticeKind.RETIREMENT if ends else MachineNoticeKind.MAINTENANCE
    return MachineNotice(kind, _seconds(parsedate_to_datetime(event.not_before)))


def _seconds(at: datetime) -> float:
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


class NoticeWatch:
    """What the machine's cloud says of it, asked again and again. `notices` None: not known."""

    def __init__(self, on_change: Callable[[], None], metadata: Metadata | None = None) -> None:
        self.notices: tuple[MachineNotice, ...] | None = None
        self._on_change, self._metadata = on_change, metadata or Metadata()
        self._trouble = ""

    async def run_once(self) -> None:
        """Ask, tell what changed, and wait until it is time to ask again."""
        await self.look()
        await asyncio.sleep(ASK_EVERY_S + random.random() * JITTER_S)

    async def look(self) -> None:
        """Ask once, and tell what changed."""
        try:
            found = await asyncio.to_thread(self._metadata.notices, asyncio.get_running_loop().time())
            trouble = ""
        except NotKnown as error:
            found, trouble = None, str(error)
        if trouble and not self._trouble:
            log.warning("what the machine's cloud says of it is not known: %s", trouble)
        self._trouble = trouble
        if found != self.notices:
            self.notices = found
            self._on_change()


def is_in_aws(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this machine was launched by AWS, as its machine agent says."""
    return environ.get(CLOUD_VARIABLE) == AWS
