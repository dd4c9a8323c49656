"""Targets of exports: a file, S3, a syslog server. Each stores lines within a bounded time, or raises with the reason.
Nothing is buffered: the caller continues after the last stored batch."""

import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
LONGEST_LINE = 1024 * 1024
"""Bytes read from the end of a file to find its last record, which has at most 32 KiB of changes."""
SYSLOG_PORT = 514
LONGEST_DATAGRAM = 8 * 1024
"""Maximum message that receivers of syslog over UDP accept in practice (RFC 5426 recommends 2 KiB)."""
AUDIT_INFO = 13 * 8 + 6
"""Facility "log audit", severity "informational" (RFC 5424)."""


class BadTarget(ValueError):
    """Not a valid target; the text lists the valid forms."""


class ExportFailed(Exception):
    """The target did not store the lines; the text has the reason."""


class Sink(Protocol):
    """One target. `first` and `last` are the numbers of the first and last record."""

    def take(self, lines: Sequence[str], first: int, last: int) -> None:
        """Store the lines. Raises ExportFailed if not all are stored; the same lines may be sent again."""


class FileSink:
    """Appends to a file of JSON lines, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self, lines: Sequence[str], first: int, last: int) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ExportFailed(f"{self.path}: {error.strerror or error}") from error

    def last_line(self) -> str:
        """Returns the last complete line, or "". Raises OSError if the file cannot be read."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - LONGEST_LINE))
            whole = file.read().rpartition(b"\n")[0]
        return whole.rpartition(b"\n")[2].decode(errors="replace")


class BucketSink:
    """One object of JSON lines for each batch. Credentials, region and endpoint are boto3's own settings."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix

    def take(self, lines: Sequence[str], first: int, last: int) -> None:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S, retries={"total_max_attempts": 2}
        )
        name = f"audit-{first:012d}-{last:012d}.jsonl"
        key = f"{self.prefix}/{name}" if self.prefix else name
        body = "".join(f"{line}\n" for line in lines).encode()
        try:
            client = boto3.client("s3", config=config)
            client.put_object(Bucket=self.bucket, Key=key, Body=body, ContentType="application/x-ndjson")
        except (BotoCoreError, ClientError) as error:
            raise ExportFailed(f"s3://{self.bucket}/{key}: {error}") from error


class SyslogSink:
    """RFC 5424 messages: one datagram each, or over TCP with their length before them (RFC 6587)."""

    def __init__(self, host: str, port: int, *, tcp: bool) -> None:
        self.host, self.port, self.tcp = host, port, tcp

    def take(self, lines: Sequence[str], first: int, last: int) -> None:
        messages = [self._message(line).encode() for line in lines]
        try:
            if self.tcp:
                with socket.create_connection((self.host, self.port), CONNECT_TIMEOUT_S) as connection:
                    connection.settimeout(READ_TIMEOUT_S)
                    connection.sendall(b"".join(b"%d %s" % (len(message), message) for message in messages))
                return
            self._datagrams(messages, first)
        except OSError as error:
            raise ExportFailed(f"syslog at {self.host}:{self.port}: {error.strerror or error}") from error

    def _datagrams(self, messages: Sequence[bytes], first: int) -> None:
        for number, message in enumerate(messages, first):
            if len(message) > LONGEST_DATAGRAM:
                raise ExportFailed(f"record {number} has {len(message)} bytes; use syslog+tcp://, which has no limit")
        family, kind, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as connection:
            connection.settimeout(READ_TIMEOUT_S)
            for message in messages:
                connection.sendto(message, address)

    @staticmethod
    def _message(line: str) -> str:
        return f"<{AUDIT_INFO}>1 - {socket.gethostname()} switchyard - audit - {line}"


def sink_of(target: str) -> Sink:
    """Returns the sink of a target. Raises BadTarget if it is not a valid target."""
    try:
        parts = urlsplit(target)
        port = parts.port or SYSLOG_PORT
    except ValueError as error:
        raise BadTarget(f"{target!r}: {error}") from error
    match parts.scheme:
        case "file" | "" if parts.path.startswith("/") and not parts.netloc:
            return FileSink(Path(parts.path))
        case "s3" if parts.netloc:
            return BucketSink(parts.netloc, parts.path.strip("/"))
        case "syslog" | "syslog+tcp" if parts.hostname:
            return SyslogSink(parts.hostname, port, tcp=parts.scheme == "syslog+tcp")
    forms = "s3://bucket/prefix, file:///absolute/path, syslog://host:514 or syslog+tcp://host:6514"
    raise BadTarget(f"{target!r} is not a target of exports; it must have the form {forms}")
