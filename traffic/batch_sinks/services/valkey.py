"""Writes entries to Valkey or Redis in pipelines. The server's address is resolved and checked at each connection, and
the connection goes to the checked address. Nothing that the server answers leads to another address."""

import socket
import ssl
from collections.abc import Sequence
from typing import Any

import redis
from django.conf import settings as django_settings
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.retry import Retry

from kernel.outbound import RefusedUrl, choose_address, parse_networks
from traffic.batch_sinks.models import BatchSink
from traffic.batch_sinks.planner import Entry, SinkSettings, ValkeyAddress, parse_valkey_url
from traffic.batch_sinks.services.sinks import sink_password

FOR_NOW = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.OutOfMemoryError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
FOR_NOW_TEXTS = ("NOREPLICAS", "MISCONF", "BUSY", "UNBLOCKED")


class SinkAway(Exception):
    """The sink cannot take entries now."""


class SinkRefused(Exception):
    """The sink takes no entry until an admin changes it."""


class _PinnedConnection(Connection):
    """Connects to an address that was checked, while certificates are checked for the name."""

    def __init__(self, *, pinned: str, **options: Any) -> None:
        self._pinned = pinned
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        name, self.host = self.host, self._pinned
        try:
            return super()._connect()  # type: ignore[no-untyped-call]
        finally:
            self.host = name


class _PinnedTlsConnection(SSLConnection, _PinnedConnection):
    pass


class ValkeyWriter:
    """A connection to a sink. Raises SinkAway if its name cannot be resolved. Raises SinkRefused if its address is not
    allowed."""

    def __init__(self, row: BatchSink, settings: SinkSettings) -> None:
        self._ttl_s = row.ttl_s or None
        address = parse_valkey_url(row.url)
        pinned = _checked_address(address)
        options: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "db": address.database,
            "username": row.username or None,
            "password": sink_password(row) or None,
            "socket_timeout": settings.timeout_s,
            "socket_connect_timeout": settings.timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "pinned": pinned,
        }
        kind: type[Connection] = _PinnedConnection
        if address.tls:
            kind = _PinnedTlsConnection
            options |= {
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            }
            options |= {"ssl_ca_data": row.ca_pem} if row.ca_pem else {}
        self._client = redis.Redis(connection_pool=ConnectionPool(connection_class=kind, max_connections=1, **options))

    def write(self, entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
        """Sets these keys in one pipeline. Repeating it does no harm. Returns the entries that the server refuses for
        good, with its reasons."""
        pipeline = self._client.pipeline(transaction=False)
        for entry in entries:
            pipeline.set(entry.key, entry.value, ex=self._ttl_s)
        try:
            answers = pipeline.execute(raise_on_error=False)
        except redis.AuthenticationError as error:
            raise SinkRefused(f"the user or password is not accepted: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise SinkAway(str(error) or type(error).__name__) from error
        refused = []
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, Exception):
                _raise_for_all(answer)
                refused.append((entry, str(answer)[:200]))
        return refused

    def close(self) -> None:
        self._client.close()
        self._client.connection_pool.disconnect()


def _raise_for_all(answer: Exception) -> None:
    """Errors that concern the server and not one entry."""
    text = str(answer)
    if isinstance(answer, redis.AuthenticationError):
        raise SinkRefused(f"the user or password is not accepted: {text[:200]}") from answer
    if isinstance(answer, redis.exceptions.AskError):  # also MovedError
        raise SinkRefused("it runs in cluster mode, which is not supported: use a server without it") from answer
    if isinstance(answer, FOR_NOW) or text.startswith(FOR_NOW_TEXTS):
        raise SinkAway(text[:200]) from answer


def _checked_address(address: ValkeyAddress) -> str:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SinkAway(f"{address.host} cannot be resolved: {error}") from error
    try:
        networks = parse_networks(django_settings.WEBHOOK_NETWORKS)
        return choose_address(address.target, [str(entry[4][0]) for entry in found], networks)
    except RefusedUrl as refused:
        raise SinkRefused(str(refused).replace("https", "TLS (valkeys://)")) from refused
