"""The install's name in clouds, and whether it may change anything there.

Asks STS whose keys signed a machine's proof. It speaks to one fixed host for each region and follows nobody
elsewhere. Without boto3: nothing is signed here, and web does not load it.
"""

import contextlib
import http.client
import os
import re
import secrets
import socket
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from fleet.agents.planner import BODY, CONTENT_TYPE, Proof, ProofRefused
from fleet.clouds.base import Later
from fleet.clouds.models import Install
from fleet.clouds.planning.upkeep import stale_reason

DRY_RUN = timedelta(days=1)
"""On an install's first day garbage collection logs what it would delete, and deletes nothing."""
READ_ONLY_RETRY_S = 60.0


def install_ensure(now: datetime) -> Install:
    """The row of this control plane; made with a name of its own when a cloud is used first."""
    found = Install.objects.first()
    if found is not None:
        return found
    new = {"id": f"sw-{secrets.token_hex(6)}", "created_at": now, "dry_run_until": now + DRY_RUN}
    return Install.objects.get_or_create(only=True, defaults=new)[0]


def install_that_may_change(now: datetime) -> Install:
    """The same, of one that holds its clouds.

    Raises:
        Later: it is read-only.
    """
    install = install_ensure(now)
    reason = install.read_only or stale_reason(install.beat_at, now)
    if reason:
        raise Later(f"nothing is launched or ended: {reason}", READ_ONLY_RETRY_S)
    return install


LIMIT_S = 5.0
"""To connect, and once more for the whole answer."""
ANSWER_BYTES = 16 * 1024
"""STS's own has some 500."""
_ARN = re.compile(rb"<Arn>([^<>\s]{1,400})</Arn>")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")
_LATER = frozenset({"Throttling", "ThrottlingException", "RequestLimitExceeded"})


class StsSilent(Exception):
    """STS did not answer, or not as STS; the text says how."""


def sts_url(region: str, environment: Mapping[str, str] = os.environ) -> str:
    """Of the STS of a region: that of `AWS_ENDPOINT_URL_STS` or `AWS_ENDPOINT_URL`, as AWS's own tools read them, or
    AWS's. `REGION` as a region gives the text in which machines put theirs."""
    own = environment.get("AWS_ENDPOINT_URL_STS") or environment.get("AWS_ENDPOINT_URL")
    if own:
        return own.rstrip("/")
    return f"https://sts.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def sts_host(region: str, environment: Mapping[str, str] = os.environ) -> str:
    """As the header `Host` of a question to it has it."""
    return urlsplit(sts_url(region, environment)).netloc


def caller_arn(proof: Proof, url: str) -> str:
    """The ARN of whose keys signed. Blocks for twice `LIMIT_S` at most, and for the look-up of the name.

    Raises:
        ProofRefused: STS refuses the signature; the text has its code.
        StsSilent: no answer in time, a redirect, an error that may pass, or nothing that STS would say.
    """
    status, body = _ask(urlsplit(url), {**proof.headers, "content-type": CONTENT_TYPE})
    code = _CODE.search(body)
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR and code:
        name = code[1].decode()
        if name not in _LATER:
            raise ProofRefused(f"STS refuses the signature: {name}")
    if status != HTTPStatus.OK:
        raise StsSilent(f"{url} answered {status}")
    arns = _ARN.findall(body)
    if b"<GetCallerIdentityResponse" not in body or len(arns) != 1:
        raise StsSilent(f"{url} answered something that is not whose keys they are")
    return str(arns[0].decode("ascii", "replace"))


def _ask(url: SplitResult, headers: Mapping[str, str]) -> tuple[int, bytes]:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=LIMIT_S)
    watch = None
    try:
        connection.connect()
        # A socket's own limit counts anew with each piece that comes.
        watch = threading.Timer(LIMIT_S, _cut, [connection.sock])
        watch.daemon = True
        watch.start()
        connection.request("POST", "/", BODY, {**headers, "connection": "close"})
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StsSilent(f"{url.geturl()} does not answer: {str(error) or type(error).__name__}") from None
    finally:
        if watch is not None:
            watch.cancel()
        connection.close()
    if len(body) > ANSWER_BYTES:
        raise StsSilent(f"{url.geturl()} answered more than {ANSWER_BYTES} bytes")
    return answer.status, body


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
