"""`Idempotency-Key`: a repeated POST does its work once and gets the stored answer.

Key, work and stored answer are one transaction. Only successes are stored: a refused request changed nothing and may be
repeated with the same key. Answers with a secret are not stored: a repetition gets the message that the work was done.
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
"""The form of secrets that are shown once (kernel.secrets)."""


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A caller's key with its request. `fingerprint` is a digest of method, path, parameters and body."""

    caller: str
    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    status: int
    body: bytes


def fingerprint_of(*, method: str, path: str, query: str, body: Any) -> str:
    """Returns a digest of a request, independent of the order of its fields.

    It is keyed, because a body may have a password, which readers of the table could guess from a plain digest."""
    content = json.dumps([method, path, query, body], sort_keys=True, default=str)
    return salted_hmac(_SALT, content.encode(errors="surrogatepass"), algorithm="sha256").hexdigest()


def validated_key(key: str) -> str:
    """Validates a key. Raises InvalidInput if it is empty, too long, or with other than visible ASCII characters."""
    if not _FORM.fullmatch(key):
        message = f"must be 1 to {LONGEST} visible ASCII characters without spaces, such as a UUID"
        raise InvalidInput(field=HEADER, rule="form", message=message)
    return key


def respond_once(
    request: IdempotentRequest, act: Callable[[], StoredResponse], *, secret: bool, now: datetime
) -> tuple[StoredResponse, datetime | None]:
    """Do the work, or return the stored answer and its time.

    `secret`: the answer has a secret and must not be stored. Raises InProgress if a request with this key is in
    progress, or its answer cannot be repeated. Raises KeyUsedOtherwise if the key was used for another request."""
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
    """Takes a lock until the end of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [f"{request.caller}\n{request.key}"]
        )
        return bool(cursor.fetchone()[0])


def _repeated(stored: IdempotentAnswer, request: IdempotentRequest) -> StoredResponse:
    if stored.fingerprint != request.fingerprint:
        raise KeyUsedOtherwise("this Idempotency-Key was used for another request; every request needs its own")
    if stored.body is None:
        raise InProgress(
            f"this was done at {stored.created_at:%Y-%m-%d %H:%M:%S} UTC; the answer showed a secret, once, and is not "
            "repeated. Look for what was made, and make a new secret if you have not got it"
        )
    return StoredResponse(stored.status, bytes(stored.body))
