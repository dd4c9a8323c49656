"""Where the control plane is: one address or several, of which an agent uses one as long as it answers.

The first ones stand on the agent's command line; the control plane names the ones that count, and they are kept, so
that an agent that starts while the host of its command line is away finds another.
"""

import json
import logging
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from engine_agent.node.journal import write_durably
from engine_agent.protocol.strict_json import strict_loads

SERVERS_FILE = "servers.json"
MAX_SERVERS, MAX_URL_CHARS = 16, 200
SILENT_HOST_S = 3
"""A host of the control plane that is off is noticed after this long, where there is another one."""

log = logging.getLogger(__name__)


class Servers:
    """Of the agent with this id. Agents begin at different ones, so that each gets its share.

    Raises:
        ValueError: `stated`, separated by commas, has no usable address or one that is none.
    """

    def __init__(self, stated: str, home: Path, agent_id: str) -> None:
        self._file = home / SERVERS_FILE
        self._share = zlib.crc32(agent_id.encode())
        named = checked(stated.split(","))
        # Also those of the command line: the control plane may have moved while this agent was not there to hear it.
        self._urls = self._in_own_order(self._kept() or named)
        self._urls += [url for url in named if url not in self._urls]
        self._tried = 0

    @property
    def current(self) -> str:
        """The address to use now, without a slash at its end."""
        return self._urls[0]

    @property
    def all(self) -> tuple[str, ...]:
        """Each of them, in the order of this agent."""
        return tuple(self._urls)

    @property
    def are_several(self) -> bool:
        return len(self._urls) > 1

    @property
    def has_untried(self) -> bool:
        """Whether one was not tried since the last one answered."""
        return self._tried < len(self._urls)

    def answered(self) -> None:
        """The current one serves this agent."""
        self._tried = 0

    def failed(self) -> None:
        """The current one does not: the next one is."""
        self._tried += 1
        self._urls = [*self._urls[1:], self._urls[0]]

    def begin_again(self) -> None:
        """All were tried, and there was a pause."""
        self._tried = 0

    def learn(self, urls: Sequence[str]) -> None:
        """Take over what the control plane names, and keep it. Nothing, or nothing usable, changes nothing."""
        if not urls:
            return
        try:
            named = checked(urls)
        except ValueError as error:
            log.error("the control plane named no usable servers: %s", error)
            return
        if set(named) == set(self._urls):
            return
        current, self._urls = self.current, self._in_own_order(named)
        if current in self._urls:
            while self.current != current:
                self._urls = [*self._urls[1:], self._urls[0]]
        log.info("the control plane is at %s", ", ".join(self._urls))
        try:
            write_durably(self._file, json.dumps(sorted(named)).encode(), mode=0o600)
        except OSError as error:
            log.error("not kept: %s", error)

    def _kept(self) -> list[str]:
        try:
            return checked(strict_loads(self._file.read_bytes()))
        except (OSError, ValueError):
            return []

    def _in_own_order(self, urls: list[str]) -> list[str]:
        first = self._share % len(urls)
        return [*urls[first:], *urls[:first]]


def checked(urls: object) -> list[str]:
    """Addresses without a slash at their end, each once.

    Raises:
        ValueError: one is none, or there are none or too many.
    """
    if not isinstance(urls, list | tuple) or not 0 < len(urls) <= MAX_SERVERS:
        raise ValueError(f"the control plane has 1 to {MAX_SERVERS} addresses")
    return list(dict.fromkeys(_checked(url) for url in urls))


def _checked(url: object) -> str:
    text = url.strip().rstrip("/") if isinstance(url, str) else ""
    parts = urlsplit(text)
    is_plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_URL_CHARS
    if not is_plain or parts.scheme not in {"http", "https"} or not parts.hostname or parts.path or parts.query:
        raise ValueError(f"server must be http://HOST:PORT or https://HOST:PORT, not {url!r:.220}")
    parts.port  # noqa: B018 - raises where it is no number
    return text


def notice_silence(line: socket.socket) -> None:
    """Have the kernel end a connection whose other host has said nothing for `SILENT_HOST_S`, by its own probes: they
    cost no process anything."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, SILENT_HOST_S - 1),
        (socket.TCP_USER_TIMEOUT, SILENT_HOST_S * 1000),
    ):
        line.setsockopt(socket.IPPROTO_TCP, option, value)
