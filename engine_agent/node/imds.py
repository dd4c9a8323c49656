"""Reads notices of a cloud from the metadata of an EC2 machine, only by IMDSv2: spot interruption, rebalance
recommendation, scheduled maintenance. The machine's agent does so, once for all nodes of the machine. This works even
while the control plane's calls to the cloud fail, and on hosts that the control plane did not launch. Usually there is
no notice. Errors are logged once and retried, and the notices are then reported as unknown."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import msgspec

from engine_agent.protocol.machine_messages import MachineNotice
from engine_agent.protocol.states import MachineNoticeKind

CLOUD_VARIABLE = "SWITCHYARD_CLOUD"
AWS = "aws"
VENDOR_FILE, VENDOR = "sys/class/dmi/id/sys_vendor", "Amazon EC2"
"""As systemd-detect-virt recognises instances."""
ADDRESS = ("169.254.169.254", 80)
POLL_EVERY_S = 4.0
JITTER_S = 2.0
"""Five seconds on average, as AWS recommends."""
LIMIT_S = 2.0
"""Timeout of a request: the service runs on the machine's own host."""
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
"""In the code of an event after which the machine no longer exists."""
OK, NO_TOKEN, NOTHING_THERE = 200, 401, 404

log = logging.getLogger(__name__)


class MetadataUnavailable(Exception):
    """The metadata service did not answer as documented."""


class _Action(msgspec.Struct, frozen=True):
    action: str
    time: str


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    code: str
    state: str
    not_before: str


class Metadata:
    """The metadata service of this machine. Calls block, each at most `LIMIT_S` between two bytes."""

    def __init__(self, address: tuple[str, int] = ADDRESS) -> None:
        self._address = address
        self._token, self._token_until_s = "", 0.0

    def notices(self, now_s: float) -> tuple[MachineNotice, ...]:
        """Current notices. `now_s`: of a monotonic clock. Raises MetadataUnavailable if an answer is missing or
        invalid."""
        return notices_of(*(self._read(path, now_s) for path in (SPOT, REBALANCE, MAINTENANCE)))

    def _read(self, path: str, now_s: float) -> bytes:
        """Returns an empty body if there is nothing of this kind."""
        status, body = self._get_metadata(path, now_s)
        if status == NO_TOKEN:  # it expired early, for example because the machine was stopped and started
            self._token = ""
            status, body = self._get_metadata(path, now_s)
        if status == NOTHING_THERE:
            return b""
        if status != OK:
            raise MetadataUnavailable(f"{path} answers {status}")
        return body

    def _get_metadata(self, path: str, now_s: float) -> tuple[int, bytes]:
        return self._request(
            "GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._current_token(now_s)}
        )

    def _current_token(self, now_s: float) -> str:
        if not self._token or now_s >= self._token_until_s:
            lives = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIVES_S)}
            status, body = self._request("PUT", "/latest/api/token", lives)
            if status != OK or not body.isascii() or not body.decode().isprintable():
                raise MetadataUnavailable(f"no token: status {status}")
            self._token, self._token_until_s = body.decode(), now_s + TOKEN_AGAIN_S
        return self._token

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        connection = HTTPConnection(*self._address, timeout=LIMIT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read(BODY_MOST + 1)
        except (OSError, HTTPException, ValueError) as error:
            raise MetadataUnavailable(f"{path} does not answer: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if len(body) > BODY_MOST:
            raise MetadataUnavailable(f"{path} answers more than {BODY_MOST} bytes")
        return answer.status, body


def notices_of(spot: bytes, rebalance: bytes, maintenance: bytes) -> tuple[MachineNotice, ...]:
    """Parses the three documents (empty: no notice); returns the first notice of each kind. Pure. Raises
    MetadataUnavailable if a document is not as AWS documents it."""
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
        raise MetadataUnavailable(f"invalid document: {str(error)[:200]}") from error
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
    """Polls for notices of the machine's cloud. `notices` None: unknown."""

    def __init__(self, on_change: Callable[[], None], metadata: Metadata) -> None:
        self.notices: tuple[MachineNotice, ...] | None = None
        self._on_change, self._metadata = on_change, metadata
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_EVERY_S + random.random() * JITTER_S)

    async def poll(self) -> None:
        try:
            found = await asyncio.to_thread(self._metadata.notices, asyncio.get_running_loop().time())
            trouble = ""
        except MetadataUnavailable as error:
            found, trouble = None, str(error)
        if trouble and not self._trouble:
            log.warning("notices of the machine's cloud are unknown: %s", trouble)
        self._trouble = trouble
        if found != self.notices:
            self.notices = found
            self._on_change()


def metadata_here(variables: Mapping[str, str], root: Path = Path("/")) -> Metadata | None:
    """The metadata service of this machine; None if it is no EC2 instance. The control plane stated that when the
    machine joined (`variables`), or the firmware does."""
    if variables.get(CLOUD_VARIABLE) == AWS:
        return Metadata()
    try:
        vendor = (root / VENDOR_FILE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return Metadata() if vendor == VENDOR else None
