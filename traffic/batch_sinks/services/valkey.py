"""Writes entries to Valkey or Redis in pipelines, with or without cluster mode. An address is resolved and checked at
each connection, also that of a node that another node of its cluster names, and the connection goes to the checked
address."""

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from django.conf import settings as django_settings
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.crc import key_slot
from redis.retry import Retry

from kernel.outbound import RefusedUrl, choose_address, parse_networks
from traffic.batch_sinks.models import BatchSink
from traffic.batch_sinks.planner import Entry, Node, SinkSettings, ValkeyAddress, named_node, parse_valkey_url, slots_of
from traffic.batch_sinks.services.sinks import sink_password

T = TypeVar("T")
FOR_NOW = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.OutOfMemoryError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
NODES_MOST = 500
"""The most nodes of a cluster of ElastiCache."""
REDIRECTIONS_MOST = 5
NO_DATABASE = ("SELECT is not allowed", "DB index is out of range", "invalid DB index")
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
    """Connections to a sink: one, or one per node if a server answers that a key is elsewhere. Raises SinkAway if its
    name cannot be resolved. Raises SinkRefused if its address is not allowed."""

    def __init__(self, row: BatchSink, settings: SinkSettings) -> None:
        self._ttl_s = row.ttl_s or None
        self._row, self._settings = row, settings
        self._address = parse_valkey_url(row.url)
        self._entrance: Node = (self._address.host, self._address.port)
        self._clients: dict[Node, redis.Redis] = {self._entrance: self._connected(self._entrance)}
        self._slots: dict[int, Node] = {}
        """Node of each slot; empty until a node has answered that a key is elsewhere."""

    def write(self, entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
        """Sets these keys in one pipeline per node. Repeating it does no harm. Returns the entries that the server
        refuses for good, with its reasons."""
        refused: list[tuple[Entry, str]] = []
        left = list(entries)
        for _ in range(REDIRECTIONS_MOST):
            left = self._write_once(left, refused)
            if not left:
                return refused
        raise SinkAway("the cluster moves its slots to other nodes")

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
            client.connection_pool.disconnect()

    def _write_once(self, entries: Sequence[Entry], refused: list[tuple[Entry, str]]) -> list[Entry]:
        """Returns the entries whose slots are elsewhere, and notes where."""
        by_node: dict[Node, list[Entry]] = {}
        for entry in entries:
            node = self._slots.get(key_slot(entry.key), self._entrance) if self._slots else self._entrance
            by_node.setdefault(node, []).append(entry)
        moved: list[Entry] = []
        for node, own in by_node.items():
            for entry, answer in zip(own, self._set(node, own), strict=True):
                if isinstance(answer, redis.exceptions.MovedError):
                    self._note_moved(node, answer)
                    moved.append(entry)
                elif why := self._refusal(node, entry, answer):
                    refused.append((entry, why))
        return moved

    def _refusal(self, node: Node, entry: Entry, answer: Any) -> str:
        """Returns why an entry is refused for good, or empty. If its slot moves to another node, it is sent there."""
        if isinstance(answer, redis.exceptions.AskError):
            (answer,) = self._set(named_node(answer.host, answer.port, node), [entry], asking=True)
        if not isinstance(answer, Exception):
            return ""
        _raise_for_all(answer)
        return str(answer)[:200]

    def _set(self, node: Node, entries: Sequence[Entry], *, asking: bool = False) -> list[Any]:
        """Returns an answer for each entry. `asking`: its slot is on the way to this node."""
        pipeline: Any = self._client(node).pipeline(transaction=False)
        for entry in entries:
            if asking:
                pipeline.execute_command("ASKING")
            pipeline.set(entry.key, entry.value, ex=self._ttl_s)
        answers = _executed(lambda: pipeline.execute(raise_on_error=False))
        return list(answers[1::2] if asking else answers)

    def _note_moved(self, node: Node, moved: redis.exceptions.MovedError) -> None:
        """Reads all slots once, and later the one that has moved."""
        if not self._slots:
            client: Any = self._client(node)
            found: Any = _executed(lambda: client.execute_command("CLUSTER SLOTS"))
            try:
                self._slots = slots_of(found, node)
            except (TypeError, ValueError) as error:
                raise SinkAway(f"it answers CLUSTER SLOTS with something else: {str(error)[:100]}") from error
        self._slots[int(moved.slot_id)] = named_node(moved.host, moved.port, node)

    def _client(self, node: Node) -> "redis.Redis":
        if node not in self._clients:
            if len(self._clients) >= NODES_MOST:
                raise SinkRefused(f"its cluster has more than {NODES_MOST} nodes")
            self._clients[node] = self._connected(node)
        return self._clients[node]

    def _connected(self, node: Node) -> "redis.Redis":
        """Connects to an address that is allowed, whether an admin or a node of the cluster has named it."""
        row, address = self._row, ValkeyAddress(*node, self._address.database, self._address.tls)
        options: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "db": address.database,
            "username": row.username or None,
            "password": sink_password(row) or None,
            "socket_timeout": self._settings.timeout_s,
            "socket_connect_timeout": self._settings.timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "pinned": _checked_address(address),
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
        return redis.Redis(connection_pool=ConnectionPool(connection_class=kind, max_connections=1, **options))


def _executed(work: Callable[[], T]) -> T:
    try:
        return work()
    except redis.AuthenticationError as error:
        raise SinkRefused(f"the user or password is not accepted: {error}") from error
    except redis.ResponseError as error:
        if any(text in str(error) for text in NO_DATABASE):
            raise SinkRefused(f"it does not have this database; a cluster has only 0: {error}") from error
        raise SinkAway(str(error)[:200]) from error
    except (redis.RedisError, OSError) as error:
        raise SinkAway(str(error) or type(error).__name__) from error


def _raise_for_all(answer: Exception) -> None:
    """Errors that concern the server and not one entry."""
    text = str(answer)
    if isinstance(answer, redis.AuthenticationError):
        raise SinkRefused(f"the user or password is not accepted: {text[:200]}") from answer
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
