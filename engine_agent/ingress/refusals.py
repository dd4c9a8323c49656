"""Counts the requests that ended with 5xx and that no cell counts, from the lines of the access log.

A request counts once, at the ingress that its client asked: a line with a hop mark is another region's. What a cell
failed for good it counts as its own error. What it handed back, to be tried elsewhere, counts here if the client got no
better answer. Requests whose client left, whose own deadline ended them, or that are sent again until their time is
over (class `batch`, and what the control plane sends for later) are no failures that a user saw.
"""

import contextlib
import logging
import os
import re
import threading
import uuid
from pathlib import Path

import msgspec

from engine_agent.protocol.ingress_messages import Refusals, RefusedAccount
from engine_agent.protocol.states import ServingClass

log = logging.getLogger(__name__)

FILE = "refusals.json"
MOST_DEPLOYMENTS = 500
"""With refused requests; what others were refused counts without a deployment."""
MOST_ACCOUNTS = 1024
"""What others were refused counts without a key."""
ACCOUNTS_PER_REPORT = 200
"""Some 25 KB; a frame holds 256."""
TURN_S = 15.0
"""As `report.TURN_S`."""
UNKNOWN = "-"
POOL = "pool."
OF_DEADLINE = frozenset({"deadline_exceeded", "deadline_unreachable", "deadline_before_cell"})
UNKNOWN_METHOD = 501
"""The client's fault, though its status begins with a 5."""
LEFT_BEFORE_ANSWER = frozenset({"CR", "CQ", "CC", "CH", "CT", "cR", "cQ", "cC", "cH", "cT"})
"""HAProxy's termination states: the client closed, or was silent, before it got the head of an answer."""
_CODE = re.compile(r"[a-z0-9_]{1,40}")

AccountName = tuple[str, str, str]
"""Deployment, key and serving class."""


class LogLine(msgspec.Struct, frozen=True, rename={"serving_class": "class"}):
    """What of a line decides whether it counts, and where."""

    status: int
    hop: str
    pool: str
    deployment: str
    key: str
    serving_class: str
    cell: str
    error: str
    handed_back: int
    is_sender: int
    ended: str


class _Stored(msgspec.Struct):
    since: str
    codes: dict[str, dict[str, int]]
    accounts: list[tuple[AccountName, int]]


_lines = msgspec.json.Decoder(LogLine)


def is_refused(line: LogLine) -> bool:
    """Whether the request failed and no cell counts that."""
    if line.status < 500 or line.status == UNKNOWN_METHOD or line.hop != UNKNOWN or line.ended in LEFT_BEFORE_ANSWER:
        return False
    if line.is_sender == 1 or line.serving_class == ServingClass.BATCH or line.error in OF_DEADLINE:
        return False
    return line.cell == UNKNOWN or line.handed_back == 1


def deployment_of(line: LogLine) -> str:
    """Empty for what failed before its model was known."""
    if line.pool.startswith(POOL):
        return line.pool.removeprefix(POOL)
    return "" if line.deployment == UNKNOWN else line.deployment


class RefusalCounting:
    """The counts of one ingress, in a file beside its access log. One thread notes, another reports."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self._lock = threading.Lock()
        self._since = str(uuid.uuid4())
        self._codes: dict[str, dict[str, int]] = {}
        self._accounts: dict[AccountName, int] = {}
        self._turn_began_s = 0.0
        self._first = 0
        self._load()

    def note(self, lines: bytes) -> None:
        """Count whole lines of the access log.

        Raises:
            OSError: the counts could not be written; they are counted.
        """
        refused = [line for line in _failed(lines) if is_refused(line)]
        if not refused:
            return
        with self._lock:
            for line in refused:
                self._count(line)
            stored = msgspec.json.encode(_Stored(self._since, self._codes, list(self._accounts.items())))
        beside = self._path.with_suffix(".new")
        beside.write_bytes(stored)
        os.replace(beside, self._path)

    def report(self, now_s: float) -> Refusals | None:
        """The part of a report that is about refused requests; None while none was."""
        with self._lock:
            if not self._codes:
                return None
            if now_s >= self._turn_began_s + TURN_S:
                self._turn_began_s = now_s
                is_last = self._first + ACCOUNTS_PER_REPORT >= len(self._accounts)
                self._first = 0 if is_last else self._first + ACCOUNTS_PER_REPORT
            shown = sorted(self._accounts.items())[self._first : self._first + ACCOUNTS_PER_REPORT]
            codes = {deployment: dict(counts) for deployment, counts in self._codes.items()}
        accounts = (RefusedAccount(name[0], total, name[1], name[2]) for name, total in shown)
        return Refusals(self._since, codes, tuple(accounts))

    def _count(self, line: LogLine) -> None:
        deployment = deployment_of(line)
        if deployment not in self._codes and len(self._codes) >= MOST_DEPLOYMENTS:
            deployment = ""
        counts = self._codes.setdefault(deployment, {})
        code = line.error if _CODE.fullmatch(line.error) else f"status_{line.status}"
        counts[code] = counts.get(code, 0) + 1
        key = "" if line.key == UNKNOWN else line.key
        serving_class = "" if line.serving_class == UNKNOWN else line.serving_class
        name = (deployment, key, serving_class)
        if name not in self._accounts and len(self._accounts) >= MOST_ACCOUNTS:
            name = (deployment, "", serving_class)
        self._accounts[name] = self._accounts.get(name, 0) + 1

    def _load(self) -> None:
        """A count that cannot be read is another one from here on: nothing of it counts twice."""
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=_Stored)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read, counting begins anew: %s", self._path, error)
            return
        self._since, self._codes, self._accounts = stored.since, stored.codes, dict(stored.accounts)


def _failed(lines: bytes) -> list[LogLine]:
    if b'"status":5' not in lines:
        return []
    found = []
    for line in lines.splitlines():
        if b'"status":5' in line:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(_lines.decode(line))
    return found
