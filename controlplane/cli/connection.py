"""Sends JSON requests to the server, with timeouts and retries. It never repeats a request that may have been carried
out, except with an idempotency key."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from controlplane.cli.errors import Failure, Problem
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.server_target import LOOPBACK, Target

if TYPE_CHECKING:  # importing it takes 0.2 s, which help and completion do not need
    import httpx

CONNECT_WITHIN_S = 3.0
ANSWER_WITHIN_S = 60.0
"""A prediction for a large fleet takes longer than other requests."""
TRIES = 5
FIRST_PAUSE_S = 0.3
LONGEST_PAUSE_S = 5.0
PAGE_SIZE = 1000
AWAY = frozenset({429, 502, 503, 504})
"""Statuses that mean: try again later."""

Parameters = Mapping[str, Any]
Say = Callable[[str], None]


def pause_s(attempt: int, retry_after: str | None, chance: float) -> float:
    """Seconds to wait after the attempt of this number (from 0), doubling, with up to a quarter of jitter."""
    if retry_after and retry_after.isdecimal():
        return min(float(retry_after), LONGEST_PAUSE_S)
    return float(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * (1 + chance / 4))


class Connection:
    """One command's connection. `say` reports retries to the user."""

    def __init__(
        self,
        target: Target,
        *,
        timeout_s: float = ANSWER_WITHIN_S,
        tries: int = TRIES,
        say: Say = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        import ssl

        import httpx

        self.target = target
        self._say, self._sleep, self._tries = say, sleep, tries
        headers = {"User-Agent": "switchyard-cli", "Accept": "application/json"}
        if target.token:
            headers["Authorization"] = f"Bearer {target.token}"
        server = urlsplit(target.server)
        is_here = server.hostname in LOOPBACK
        no_authorities = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.client = httpx.Client(
            base_url=target.server,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_WITHIN_S, timeout_s)),
            # The environment's proxy cannot reach a loopback server.
            trust_env=not is_here,
            # Loading certificates takes longer than the request, and http needs none.
            verify=no_authorities if is_here and server.scheme == "http" else True,
            transport=transport,
        )

    def get(self, path: str, params: Parameters | None = None) -> Any:
        return self._answer("GET", path, params=params)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST with an idempotency key, so that a retry is carried out only once."""
        return self._answer("POST", path, body=body or {}, headers={"Idempotency-Key": str(uuid4())})

    def put(self, path: str, params: Parameters, content: bytes) -> Any:
        """PUT bytes, again after an error: what is there already is not stored twice."""
        headers = {"Content-Type": "application/octet-stream"}
        return self._answer("PUT", path, params=params, content=content, headers=headers)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._answer("PATCH", path, body=body)

    def delete(self, path: str) -> Any:
        """Deletes any revision, because the user has just confirmed it."""
        return self._answer("DELETE", path, headers={"If-Match": "*"})

    def pages(self, path: str, params: Parameters | None = None, most: int | None = None) -> Iterator[dict[str, Any]]:
        """The rows of a list, page by page, up to a limit."""
        size = PAGE_SIZE if most is None else max(1, min(most, PAGE_SIZE))
        query: Parameters | None = {**(params or {}), "page_size": size}
        following, left = path, most
        while following:
            page = self.get(following, query)
            for row in page["results"]:
                if left is not None and left <= 0:
                    return
                yield row
                left = None if left is None else left - 1
            following, query = _path_of(page.get("next")), None

    def _answer(
        self,
        method: str,
        path: str,
        *,
        params: Parameters | None = None,
        body: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        url = path if path.startswith("/") else f"/api/v1/{path}"
        request = self.client.build_request(
            method, url, params=params or None, json=body, content=content, headers=headers
        )
        for attempt in range(self._tries):
            last = attempt == self._tries - 1
            response = self._send_once(
                request, may_repeat=method in {"GET", "POST", "PUT"} and not last, may_connect=not last
            )
            if response is not None and (last or not _is_for_later(response)):
                return _content(response)
            why = f"it returns {response.status_code}" if response is not None else "no connection"
            self._say(f"{self.target.server}: {why}; trying again ({attempt + 2} of {self._tries})")
            wait = response.headers.get("Retry-After") if response is not None else None
            self._sleep(pause_s(attempt, wait, random.random()))
        raise AssertionError("the last attempt returns or raises")

    def _send_once(self, request: "httpx.Request", *, may_repeat: bool, may_connect: bool) -> "httpx.Response | None":
        """The response, or None after an error that allows a retry. Raises Failure if a retry is not allowed, or there
        are none left."""
        import httpx

        try:
            return self.client.send(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if may_connect:
                return None
            raise Failure(f"cannot reach {self.target.server}: {_reason(error)}", ExitCode.UNREACHABLE) from None
        except httpx.TimeoutException:
            raise Failure(f"{self.target.server} did not answer in time (--timeout)", ExitCode.TIMED_OUT) from None
        except httpx.TransportError as error:
            if may_repeat:
                return None
            lost = (
                f"the connection to {self.target.server} broke ({_reason(error)}); the request may have been "
                "carried out"
            )
            raise Failure(lost, ExitCode.UNREACHABLE) from None


def _is_for_later(response: "httpx.Response") -> bool:
    """Whether to try again later, which includes a 409 while the first request is being processed."""
    return response.status_code in AWAY or (response.status_code == 409 and "Retry-After" in response.headers)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _content(response: "httpx.Response") -> Any:
    try:
        content = response.json() if response.content else {}
    except ValueError:
        content = None
    if response.is_success and content is not None:
        return content
    if isinstance(content, dict) and not response.is_success:
        raise Problem(response.status_code, content)
    seen = response.text[:120].strip().replace("\n", " ")
    message = f"{response.url} returned {response.status_code} without JSON; is this a Switchyard server? {seen}"
    raise Failure(message, ExitCode.SERVER_FAULT)


def _path_of(link: str | None) -> str:
    """A page's link without its host: behind a proxy the server may know another name."""
    if not link:
        return ""
    parts = urlsplit(link)
    return f"{parts.path}?{parts.query}"
