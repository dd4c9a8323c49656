"""Lists the objects that changed after a revision. A revision is a PostgreSQL snapshot, the set of ended transactions.

Triggers record every change of a watched table with the id of its transaction (kernel.change_triggers). Sequences would
lose changes: numbers commit in another order than they are drawn, so a reader of 7 may never see 6. A snapshot names
the transactions that were still open, and their later commits are not visible in it. So readers get
every committed change, without waiting for slow transactions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus

from django.db import connection
from rest_framework.exceptions import APIException


class Refused(APIException):
    """`headers` go with the response."""

    def __init__(self, detail: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.headers = dict(headers or {})


class PreconditionFailed(Refused):
    status_code = HTTPStatus.PRECONDITION_FAILED
    default_code = "if_match"


class PreconditionRequired(Refused):
    status_code = HTTPStatus.PRECONDITION_REQUIRED
    default_code = "if_match_required"


class KeyUsedOtherwise(Refused):
    status_code = HTTPStatus.UNPROCESSABLE_ENTITY
    default_code = "idempotency_key"


class InProgress(Refused):
    status_code = HTTPStatus.CONFLICT
    default_code = "in_progress"


class RevisionGone(Refused):
    status_code = HTTPStatus.GONE
    default_code = "revision"


BEGINNING = "r0"
"""Requests all objects with their revision."""
FORM = r"r0|r[1-9][0-9]{0,17}-[1-9][0-9]{0,17}-(?:[1-9][0-9]{0,17}(?:\.[1-9][0-9]{0,17})*)?"
DEFAULT_WATCH_TIMEOUT_S = 30
MAX_WATCH_TIMEOUT_S = 60
"""Default and maximum wait of a watch; proxies cut longer silent connections."""
MOST = 1000
"""Maximum number of objects in one answer; after more changes the reader lists all again."""

_CHANGED = """
WITH asked AS (SELECT %(since)s::pg_snapshot AS since)
SELECT DISTINCT change.thing, change.key FROM kernel_change AS change, asked
WHERE change.kind = %(kind)s
    AND change.xid >= pg_snapshot_xmin(asked.since) AND NOT pg_visible_in_snapshot(change.xid, asked.since)
LIMIT %(most)s
"""
_NOW = "SELECT pg_current_snapshot()::text"
_GONE = """
SELECT pg_snapshot_xmax(%(since)s::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot())
    OR EXISTS (SELECT 1 FROM kernel_changehorizon WHERE xid >= pg_snapshot_xmin(%(since)s::pg_snapshot))
"""
_TRIM = """
WITH trimmed AS (DELETE FROM kernel_change WHERE at < %(before)s RETURNING xid)
INSERT INTO kernel_changehorizon AS horizon (id, xid)
SELECT 1, max(xid) FROM trimmed HAVING max(xid) IS NOT NULL
ON CONFLICT (id) DO UPDATE SET xid = GREATEST(horizon.xid, EXCLUDED.xid)
"""
KINDS_CHANGED = """
SELECT pg_current_snapshot()::text,
    ARRAY(SELECT DISTINCT kind FROM kernel_change
          WHERE xid >= pg_snapshot_xmin(%(since)s::pg_snapshot)
              AND NOT pg_visible_in_snapshot(xid, %(since)s::pg_snapshot))
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes until `revision`: primary key of the row as text -> its key in the API, or "" if unknown."""

    revision: str
    things: dict[str, str]


def is_revision(text: str) -> bool:
    """Whether a text is a valid revision: PostgreSQL accepts only ascending transactions from the first open one on."""
    if not re.fullmatch(FORM, text):
        return False
    if text == BEGINNING:
        return True
    first, beyond, still_open = text.removeprefix("r").split("-")
    numbers = [int(first), *(int(number) for number in still_open.split(".") if number)]
    return numbers == sorted(numbers) and numbers[-1] <= int(beyond) and (not still_open or numbers[-1] < int(beyond))


def revision_now() -> str:
    """Returns the current revision. Rows that are read after this call may be newer; they are listed again."""
    with connection.cursor() as cursor:
        cursor.execute(_NOW)
        return as_revision(cursor.fetchone()[0])


def changes_since(kind: str, revision: str) -> Changes:
    """Returns the changes of a kind. Raises RevisionGone if the changes since then were deleted or are too many; read
    the list again."""
    since, now = as_snapshot(revision), revision_now()
    with connection.cursor() as cursor:
        cursor.execute(_GONE, {"since": since})
        if cursor.fetchone()[0]:
            raise RevisionGone(f"what changed since {revision[:80]} is no longer known; begin again with {BEGINNING}")
        cursor.execute(_CHANGED, {"since": since, "kind": kind, "most": 2 * MOST + 1})
        rows = cursor.fetchall()
    things: dict[str, str] = {}
    for thing, key in rows:
        things[thing] = key or things.get(thing, "")
    if len(things) > MOST or len(rows) > 2 * MOST:
        raise RevisionGone(f"more than {MOST} changed since then; begin again with {BEGINNING}")
    return Changes(now, things)


def changes_trim(before: datetime) -> None:
    """Delete changes before a time, and record up to which transaction."""
    with connection.cursor() as cursor:
        cursor.execute(_TRIM, {"before": before})


def as_revision(snapshot: str) -> str:
    """PostgreSQL's text `10:20:10,14` -> `r10-20-10.14`, which needs no escapes in a URL."""
    return "r" + snapshot.replace(":", "-").replace(",", ".")


def as_snapshot(revision: str) -> str:
    return revision.removeprefix("r").replace("-", ":").replace(".", ",")
