"""Makes every call to AWS, within the call budget that all processes share (`fleet.clouds.planning.call_budget`). Never
calls inside a transaction, and only operations in the table of `actions`. Imports boto3 with the first call, which
takes 0.25 s and 25 MiB. A call without an answer may have been carried out; `fleet.clouds.planning.launches` handles
that case."""

import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any

from django.db import transaction

from fleet.clouds.aws.actions import TEXT_MOST, THROTTLED, is_known
from fleet.clouds.models import CallBucket
from fleet.clouds.planning.call_budget import (
    ENDED_MACHINES,
    LAUNCHED_MACHINES,
    Bucket,
    NotBefore,
    bucket_of,
    full,
    take,
    throttled,
)
from kernel import clock
from kernel.outside_transaction import refuse_inside_transaction

if TYPE_CHECKING:
    from boto3.session import Session


MACHINES = {"RunInstances": LAUNCHED_MACHINES, "TerminateInstances": ENDED_MACHINES}
"""Calls that are also metered by machines."""


def budget_spend(region: str, operation: str, machines: int) -> datetime | None:
    """Takes one call for `machines` machines from the budget of an AWS region. Returns None, or, if the budget is used
    up, the time at which it suffices again; nothing is taken then. Raises ValueError if the budget never holds that
    much."""
    wanted = [(bucket_of(operation), 1.0)]
    if operation in MACHINES:
        wanted.append((MACHINES[operation], float(machines)))
    now = clock.now()
    with transaction.atomic():
        taken = []
        for name, amount in wanted:
            row = _lock_bucket(region, name, now)
            answer = take(name, _bucket_of_row(row), now, amount)
            if isinstance(answer, NotBefore):
                return answer.at
            taken.append((row, answer.bucket))
        for row, bucket in taken:
            _store_bucket(row, bucket)
    return None


def budget_throttled(region: str, operation: str) -> None:
    now, name = clock.now(), bucket_of(operation)
    with transaction.atomic():
        row = _lock_bucket(region, name, now)
        _store_bucket(row, throttled(name, _bucket_of_row(row), now))


def _lock_bucket(region: str, name: str, now: datetime) -> CallBucket:
    fresh = full(name, now)
    new = {"tokens": fresh.tokens, "refilled_at": fresh.refilled_at}
    return CallBucket.objects.select_for_update().get_or_create(region=region, call=name, defaults=new)[0]


def _bucket_of_row(row: CallBucket) -> Bucket:
    return Bucket(row.tokens, row.refilled_at, row.halved_until)


def _store_bucket(row: CallBucket, bucket: Bucket) -> None:
    row.tokens, row.refilled_at, row.halved_until = bucket.tokens, bucket.refilled_at, bucket.halved_until
    row.save(update_fields=["tokens", "refilled_at", "halved_until"])


CONNECT_S = 3.0
READ_S = 20.0
"""Below the 60 s after which a provider's call counts as hanging."""
READ_ATTEMPTS = 4
PAGES_MOST = 2000
"""Pages of one list. EC2 returns at least 100 entries a page, and no list has 200,000."""
POOL = 16
"""Connections of one client: one for each thread that uses it."""
REPEATED = frozenset({"UploadPart", "DeleteObject", "DeleteObjects", "AbortMultipartUpload"})
"""Calls that change something and are safe to repeat."""
_CHUNK = 64 * 1024
_FIRST, _LAST = b"<networkInterfaceSet>", b"</networkInterfaceSet>"

_lock = threading.Lock()
_clients: dict[tuple[str, str, bool], Any] = {}


class CallFailed(Exception):
    """AWS did not confirm a call. `code`: AWS's, or "" without an answer; `http_status` is 0 then. `whole`: AWS's full
    message, up to thousands of characters."""

    whole = ""

    def __init__(self, code: str, text: str, http_status: int = 0) -> None:
        super().__init__(f"{code}: {text}" if code else text)
        self.code, self.text, self.http_status = code, text, http_status


class Refused(CallFailed):
    """An error answer below 500: nothing was done. `not_before`: the own call budget was used up until then, and
    nothing was sent."""

    def __init__(self, code: str, text: str, http_status: int = 400, not_before: datetime | None = None) -> None:
        super().__init__(code, text, http_status)
        self.not_before = not_before

    @property
    def is_for_now(self) -> bool:
        """Whether only the rate of calls was too high."""
        return self.not_before is not None or "Throttl" in self.code or self.code == THROTTLED


class Unanswered(CallFailed):
    """The call may have been carried out: status 500 or above, a time-out, or an unreadable answer."""


class TooLong(Exception):
    """A body exceeds the limit."""


def call(service: str, operation: str, region: str, *, machines: int = 0, **params: Any) -> dict[str, Any]:
    """Makes one call as the control plane, within the budget. Blocks for up to `READ_ATTEMPTS` times `READ_S`, or once
    `READ_S` for calls that change something. `machines`: how many the call launches or terminates. Raises Refused if it
    was not done. Raises Unanswered if it may have been done. Raises ValueError if it is not in the table of calls."""
    if service == "ec2":
        not_before = budget_spend(region, operation, machines)
        if not_before is not None:
            text = f"the own call budget of {operation} is used up until {not_before:%H:%M:%S} UTC"
            raise Refused(THROTTLED, text, 503, not_before)
    try:
        return send(service, operation, region, params)
    except CallFailed as error:
        if service == "ec2" and error.code == THROTTLED:
            budget_throttled(region, operation)
        raise


def pages(operation: str, region: str, **params: Any) -> Iterator[dict[str, Any]]:
    """Yields the pages of an EC2 list, each within the budget. Raises CallFailed as `call` does; the pages so far are
    not a complete list."""
    token = ""
    for _ in range(PAGES_MOST):
        page = call("ec2", operation, region, **(params | {"NextToken": token} if token else params))
        yield page
        token = page.get("NextToken") or ""
        if not token:
            return
    raise Unanswered("", f"{operation} has more than {PAGES_MOST} pages")


def send(service: str, operation: str, region: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """`call` without the budget. Raises RuntimeError if a transaction is open."""
    if not is_known(service, operation):
        raise ValueError(f"{service} {operation} is not in the table of calls")
    refuse_inside_transaction(f"{service} {operation}")
    may_repeat = operation.startswith(("Describe", "Get", "List")) or operation in REPEATED
    aws = client(service, region, once=not may_repeat)
    from botocore import xform_name
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, ParamValidationError
    from botocore.parsers import ResponseParserError

    try:
        answer: dict[str, Any] = getattr(aws, xform_name(operation))(**params)
    except ClientError as error:
        raise _call_failure(error.response) from error
    except ParamValidationError as error:
        raise Refused("ParamValidation", str(error)[:TEXT_MOST]) from error
    # ResponseParserError, for answers of a proxy, is not a BotoCoreError.
    except (BotoCoreError, HTTPClientError, ResponseParserError) as error:
        raise Unanswered("", f"{type(error).__name__}: {error}"[:TEXT_MOST]) from error
    return answer


def body_read(body: Any, *, most: int, limit_s: float) -> bytes:
    """Reads a streamed body of up to `most` bytes. Raises Unanswered if it broke off, or took longer than `limit_s`.
    Raises TooLong if it has more bytes."""
    from botocore.exceptions import BotoCoreError, HTTPClientError

    ends_at, read = monotonic() + limit_s, bytearray()
    try:
        while chunk := body.read(_CHUNK):
            read += chunk
            if len(read) > most:
                raise TooLong
            if monotonic() > ends_at:
                raise Unanswered("", f"it was not read completely within {limit_s:g} s")
    except (OSError, BotoCoreError, HTTPClientError) as error:
        raise Unanswered("", f"{type(error).__name__}: {error}"[:TEXT_MOST]) from error
    finally:
        body.close()
    return bytes(read)


def body_piece(body: Any, most: int) -> bytes:
    """Returns the next bytes of a streamed body; none if it ended or broke off. Raises Unanswered if it arrived
    complete but damaged."""
    from botocore.exceptions import BotoCoreError, FlexibleChecksumError, HTTPClientError

    try:
        return bytes(body.read(most))
    except FlexibleChecksumError as error:
        raise Unanswered("", f"the body is damaged: {error}"[:TEXT_MOST]) from error
    except (OSError, BotoCoreError, HTTPClientError):
        return b""


def _call_failure(response: Mapping[str, Any]) -> CallFailed:
    code = str(response.get("Error", {}).get("Code", ""))
    whole = str(response.get("Error", {}).get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    kind = Unanswered if status >= 500 or not status else Refused
    failure = kind(code, whole[:TEXT_MOST], status)
    failure.whole = whole
    return failure


def client(service: str, region: str, *, once: bool) -> Any:
    """Returns the client of a service in a region, shared by all threads: clients are thread-safe, creating one is not.
    `once` disables botocore's retries, which repeat every answer of 500, lack of capacity included."""
    with _lock:
        known = _clients.get((service, region, once))
        if known is None:
            known = _clients[service, region, once] = _make_client(service, region, once)
    return known


def _make_client(service: str, region: str, once: bool) -> Any:
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"mode": "standard", "total_max_attempts": 1 if once else READ_ATTEMPTS},
        max_pool_connections=POOL,
        tcp_keepalive=True,
        user_agent_extra="switchyard",
    )
    return _session().client(service, region_name=region, config=config)


@cache
def _session() -> "Session":
    """One for the process: its model of EC2 takes 24 MiB, which all clients share."""
    import boto3

    session = boto3.session.Session()
    session.events.register("before-parse.ec2.DescribeInstances", cut_interfaces)
    return session


def cut_interfaces(response_dict: dict[str, Any], **_: Any) -> None:
    """Removes the network interfaces from an answer (32 KiB for a P5). A machine's own address is outside them."""
    parts = response_dict["body"].split(_FIRST)
    kept = [parts[0], *(part.partition(_LAST)[2] for part in parts[1:])]
    response_dict["body"] = b"".join(kept)
