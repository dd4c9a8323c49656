"""`Idempotency-Key`: a POST that is sent again does its work once. The answer lives in PostgreSQL, beside the work.

Key, work and stored answer are one transaction: after a crash either all of it is there or nothing. Only successes are
stored, because what was refused changed nothing and may be tried again with the same key. Answers that show a secret
are never stored: a repetition learns that it was done, and where to look.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.utils.crypto import salted_hmac

from kernel.models import IdempotentAnswer
from kernel.refusals import InvalidInput
from kernel.rest.changes import InProgress, KeyUsedOtherwise

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
KEPT = timedelta(hours=24)
LONGEST = 255
_SALT = "kernel.rest.idempotency"
_FORM = re.compile(r"[\x21-\x7e]{1,255}")
_SECRET = re.compile(rb"sw_[0-9a-f]{8}_[0-9a-f]{40,}")
"""The form of all secrets that are shown once (kernel.secrets)."""


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """Who sent which key with what. `fingerprint` digests method, path, parameters and body."""

    caller: str
    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    status: int
    body: bytes


def fingerprint_of(*, method: str, path: str, query: str, body: Any) -> str:
    """Digest of what a request asks for; the order of its fields makes no difference.

    It is keyed: a body may hold a password, which a plain digest would give away to whoever reads the table.
    """
    content = json.dumps([method, path, query, body], sort_keys=True, default=str)
    return salted_hmac(_SALT, content.encode(errors="surrogatepass"), algorithm="sha256").hexdigest()


def validated_key(key: str) -> str:
    """The key itself.

    Raises:
        InvalidInput: it is empty, too long, or has other than visible ASCII characters.
    """
    if not _FORM.fullmatch(key):
        message = f"must be 1 to {LONGEST} visible ASCII characters without spaces, such as a UUID"
        raise InvalidInput(field=HEADER, rule="form", message=message)
    return key


def respond_once(
    request: IdempotentRequest, act: Callable[[], StoredResponse], *, secret: bool, now: datetime
) -> tuple[StoredResponse, datetime | None]:
    """Do the work, or repeat the answer of when it was done, and say when that was.

    `secret`: the answer shows something that nobody may read again.

    Raises:
        InProgress: a request with this key is being worked on, or its answer cannot be shown again.
        KeyUsedOtherwise: the key came with another request before.
    """
    with transaction.atomic():
        if not _alone(request):
            raise InProgress("a request with this Idempotency-Key is in progress; try again", {"Retry-After": "1"})
        rows = IdempotentAnswer.objects.filter(caller=request.caller, key=request.key)
        if stored := rows.filter(expires_at__gt=now).first():
            return _repeated(stored, request), stored.created_at
        answer = act()
        shown_once = secret or _SECRET.search(answer.body) is not None
        rows.delete()
        IdempotentAnswer.objects.create(
            caller=request.caller,
            key=request.key,
            fingerprint=request.fingerprint,
            status=answer.status,
            body=None if shown_once else answer.body,
            created_at=now,
            expires_at=now + KEPT,
        )
        return answer, None


def _alone(request: IdempotentRequest) -> bool:
    """Until the end of the transaction; a crash ends it too."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [f"{request.caller}\n{request.key}"]
        )
        return bool(cursor.fetchone()[0])


def _repeated(stored: IdempotentAnswer, request: IdempotentRequest) -> StoredResponse:
    if stored.fingerprint != request.fingerprint:
        raise KeyUsedOtherwise("this Idempotency-Key came with another request before; every request needs its own")
    if stored.body is None:
        raise InProgress(
            f"this was done at {stored.created_at:%Y-%m-%d %H:%M:%S} UTC; the answer showed a secret, once, and is not "
            "repeated. Look for what was made, and make a new secret if you have not got it"
        )
    return StoredResponse(stored.status, bytes(stored.body))
