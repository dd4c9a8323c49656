"""The install's name in clouds, whether it may change anything there, and the check of a machine's signed proof with
STS. Contacts one fixed host for each region and follows no redirect. Does not import boto3: it signs nothing, and the
web process does not need boto3."""

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
"""On an install's first day, garbage collection only logs what it would delete."""
READ_ONLY_RETRY_S = 60.0


def install_ensure(now: datetime) -> Install:
    """Returns the row of this control plane, and creates it with a new name on the first use of a cloud."""
    found = Install.objects.first()
    if found is not None:
        return found
    new = {"id": f"sw-{secrets.token_hex(6)}", "created_at": now, "dry_run_until": now + DRY_RUN}
    return Install.objects.get_or_create(only=True, defaults=new)[0]


def install_that_may_change(now: datetime) -> Install:
    """Returns the row if this install may change its clouds. Raises Later if it is read-only."""
    install = install_ensure(now)
    reason = install.read_only or stale_reason(install.beat_at, now)
    if reason:
        raise Later(f"nothing is launched or terminated: {reason}", READ_ONLY_RETRY_S)
    return install


LIMIT_S = 5.0
"""To connect, and again for the whole answer."""
ANSWER_BYTES = 16 * 1024
"""STS's answer has about 500."""
_ARN = re.compile(rb"<Arn>([^<>\s]{1,400})</Arn>")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")
_LATER = frozenset({"Throttling", "ThrottlingException", "RequestLimitExceeded"})


class StsUnavailable(Exception):
    """STS did not answer, or the answer is not STS's."""


def sts_url(region: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the URL of a region's STS: `AWS_ENDPOINT_URL_STS` or `AWS_ENDPOINT_URL` if set, as in AWS's tools, else
    AWS's. With `REGION` as the region it returns a template for machines."""
    own = environment.get("AWS_ENDPOINT_URL_STS") or environment.get("AWS_ENDPOINT_URL")
    if own:
        return own.rstrip("/")
    return f"https://sts.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def sts_host(region: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the `Host` header for requests to `sts_url`."""
    return urlsplit(sts_url(region, environment)).netloc


def caller_arn(proof: Proof, url: str) -> str:
    """Returns the ARN of the signer. Blocks for up to twice `LIMIT_S`, plus the DNS lookup. Raises ProofRefused if STS
    rejected the signature; the text has its code. Raises StsUnavailable for no answer in time, a redirect, a temporary
    error, or an unreadable answer."""
    status, body = _request_identity(urlsplit(url), {**proof.headers, "content-type": CONTENT_TYPE})
    code = _CODE.search(body)
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR and code:
        name = code[1].decode()
        if name not in _LATER:
            raise ProofRefused(f"STS rejected the signature: {name}")
    if status != HTTPStatus.OK:
        raise StsUnavailable(f"{url} answered {status}")
    arns = _ARN.findall(body)
    if b"<GetCallerIdentityResponse" not in body or len(arns) != 1:
        raise StsUnavailable(f"{url} did not return the signer")
    return str(arns[0].decode("ascii", "replace"))


def _request_identity(url: SplitResult, headers: Mapping[str, str]) -> tuple[int, bytes]:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=LIMIT_S)
    watch = None
    try:
        connection.connect()
        # A socket's time-out restarts with each received piece.
        watch = threading.Timer(LIMIT_S, _shut_down_socket, [connection.sock])
        watch.daemon = True
        watch.start()
        connection.request("POST", "/", BODY, {**headers, "connection": "close"})
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StsUnavailable(f"{url.geturl()} does not answer: {str(error) or type(error).__name__}") from None
    finally:
        if watch is not None:
            watch.cancel()
        connection.close()
    if len(body) > ANSWER_BYTES:
        raise StsUnavailable(f"{url.geturl()} answered more than {ANSWER_BYTES} bytes")
    return answer.status, body


def _shut_down_socket(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
