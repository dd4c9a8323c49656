"""Sends one message to one webhook: resolves its name, refuses what is not public, connects to the very address it
checked, follows no redirect, and gives up after a bounded time and a bounded response. It stores nothing."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fleet.planning.webhooks.delivery import (
    RefusedUrl,
    Target,
    WebhookSettings,
    choose_address,
    parse_url,
    without_path,
)

STATUS_LINE_PARTS = 2
REASON_LETTERS = 200
"""Of a response's body that a reason quotes."""
BODY_LIMIT_S = 0.5
"""For each piece of a body. It only explains the status, which is known by then."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended. `status` None: there was no response; `reason` says why it failed, empty if it did not."""

    status: int | None
    reason: str

    @property
    def delivered(self) -> bool:
        return not self.reason


async def post(url: str, body: bytes, headers: Mapping[str, str], settings: WebhookSettings) -> AttemptResult:
    """One attempt. Never raises for what the other side does."""
    try:
        async with asyncio.timeout(settings.limit_s):
            target = parse_url(url)
            address = choose_address(target, await _resolve(target), settings)
            return await _exchange(target, address, body, headers, settings)
    except RefusedUrl as refusal:
        return AttemptResult(None, f"refused: {refusal}")
    except TimeoutError:
        return AttemptResult(None, f"no whole answer within {settings.limit_s:g} s")
    except ssl.SSLError as error:
        return AttemptResult(None, f"TLS: {error.reason or error}")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        return AttemptResult(None, str(error) or type(error).__name__)


async def _resolve(target: Target) -> list[str]:
    """In a daemon thread of its own: name servers that do not answer must neither fill the loop's thread pool nor keep
    the process from exiting."""
    loop = asyncio.get_running_loop()
    resolved: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str], error: OSError | None) -> None:
        if resolved.done():
            return
        if error is None:
            resolved.set_result(addresses)
        else:
            resolved.set_exception(RefusedUrl(f"{target.host} has no address: {error.strerror}"))

    def look_up() -> None:
        addresses, error = list[str](), None
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except OSError as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, addresses, error)

    threading.Thread(target=look_up, name="resolve", daemon=True).start()
    return await resolved


@cache
def _tls() -> ssl.SSLContext:
    """Loading the authorities takes tens of milliseconds."""
    return ssl.create_default_context()


async def _exchange(
    target: Target, address: str, body: bytes, headers: Mapping[str, str], settings: WebhookSettings
) -> AttemptResult:
    is_tls = target.scheme == "https"
    reader, writer = await asyncio.open_connection(
        address,
        target.port,
        ssl=_tls() if is_tls else None,
        server_hostname=target.host if is_tls else None,
        limit=settings.response_bytes,
    )
    try:
        writer.write(_request(target, body, headers))
        await writer.drain()
        result = _judge(await _read_bounded(reader, settings.response_bytes))
        return replace(result, reason=without_path(result.reason, target))
    finally:
        writer.transport.abort()


def _request(target: Target, body: bytes, headers: Mapping[str, str]) -> bytes:
    fixed = {"Host": target.authority, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**headers, **fixed}.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _read_bounded(reader: asyncio.StreamReader, limit: int) -> bytes:
    """The response up to the bound; if the other side keeps the connection open, what comes soon after its headers."""
    response = b""
    with contextlib.suppress(TimeoutError):
        while len(response) < limit:
            has_headers = b"\r\n\r\n" in response
            async with asyncio.timeout(BODY_LIMIT_S if has_headers else None):
                piece = await reader.read(limit - len(response))
            if not piece:
                break
            response += piece
    return response


def _judge(response: bytes) -> AttemptResult:
    head, _, body = response.partition(b"\r\n\r\n")
    parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(parts) < STATUS_LINE_PARTS or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        return AttemptResult(None, "what it answered is no HTTP")
    status = int(parts[1])
    if 200 <= status < 300:
        return AttemptResult(status, "")
    if 300 <= status < 400:
        return AttemptResult(status, f"answered {status}; redirects are not followed")
    quoted = body[:REASON_LETTERS].decode("utf-8", "replace").replace("\x00", "").strip()
    return AttemptResult(status, f"answered {status}" + (f": {quoted}" if quoted else ""))
