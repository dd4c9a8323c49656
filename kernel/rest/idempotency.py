"""`Idempotency-Key`: a repeated POST does its work once and gets the stored answer. Forms of pages have a token.

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
from django.http import HttpRequest
from django.utils.crypto import salted_hmac

from kernel.models import IdempotentAnswer
from kernel.refusals import InvalidInput
from kernel.rest.changes import InProgress, KeyUsedOtherwise
from kernel.secrets import SECRET_PATTERN

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
KEPT = timedelta(hours=24)
LONGEST = 255
_SALT = "kernel.rest.idempotency"
SUBMISSION = "submission"
"""Field with the token of a form (`{% form_token %}`)."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{8,64}")
_FORM = re.compile(r"[\x21-\x7e]{1,255}")
_SECRET = re.compile(SECRET_PATTERN.encode())


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


def form_submission(request: HttpRequest) -> IdempotentRequest | None:
    """The submission of a page's form, or None without a token or a signed-in user.

    Its fields are part of the key: a form that is changed after going back in the browser is another submission."""
    token = request.POST.get(SUBMISSION, "")
    if not _TOKEN.fullmatch(token) or not request.user.is_authenticated:
        return None
    fields = sorted((name, values) for name, values in request.POST.lists() if name != "csrfmiddlewaretoken")
    files = sorted((name, [(one.name, one.size) for one in those]) for name, those in request.FILES.lists())
    query = request.META.get("QUERY_STRING", "")
    fingerprint = fingerprint_of(method="POST", path=request.path, query=query, body=[fields, files])
    return IdempotentRequest(f"form:{request.user.pk}", f"{token}:{fingerprint}", fingerprint)


def submission_find(submission: IdempotentRequest, now: datetime) -> IdempotentAnswer | None:
    """The answer to the same submission, or None. Waits for one in progress. Call it in the transaction of the work."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [_lock_name(submission)])
    rows = IdempotentAnswer.objects.filter(caller=submission.caller, key=submission.key)
    return rows.filter(expires_at__gt=now).first()


def submission_store(submission: IdempotentRequest, *, status: int, location: str, now: datetime) -> None:
    """Stores where a submission led. `location` "": it led to a page that is shown once, such as one with a secret."""
    IdempotentAnswer.objects.update_or_create(
        caller=submission.caller,
        key=submission.key,
        defaults={
            "fingerprint": submission.fingerprint,
            "status": status,
            "body": location.encode() if location else None,
            "created_at": now,
            "expires_at": now + KEPT,
        },
    )


def _lock_name(request: IdempotentRequest) -> str:
    return f"{request.caller}\n{request.key}"


def _alone(request: IdempotentRequest) -> bool:
    """Takes a lock until the end of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [_lock_name(request)])
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
