"""A front of the broker that adds what Tansu 0.6 lacks: TLS, and SASL with PLAIN and SCRAM. Then all bytes are the
broker's."""

import asyncio
import base64
import hashlib
import hmac
import secrets
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 18, 17, 36
REFUSED = 58
"""Kafka's code SASL_AUTHENTICATION_FAILED."""
UNSUPPORTED = 33
HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
ROUNDS = 4096
MOST_BYTES = 16 * 1024 * 1024


@dataclass
class SecureFront:
    """Without a user, it takes no SASL; without a context, no TLS."""

    broker: str
    context: ssl.SSLContext | None = None
    user: str = ""
    password: str = ""
    logins: int = 0
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self.context)
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, _, port = self.broker.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        try:
            if not self.user or await self._logs_in(reader, writer, there, back):
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for each in (back, writer):
                each.close()
                with suppress(OSError):
                    await each.wait_closed()
            self._tasks.discard(task)

    async def _logs_in(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> bool:
        """Passes questions about versions on, and answers SASL until the client has shown its password."""
        mechanism, scram = "", None
        while True:
            frame = await _frame(reader)
            kind, version, number, named = struct.unpack(">hhih", frame[:10])
            body = frame[10 + max(0, named) :]
            if kind == API_VERSIONS:
                back.write(_framed(frame))
                writer.write(_framed(await _frame(there)))
            elif kind == SASL_HANDSHAKE:
                mechanism = body[2:].decode()
                known = ["PLAIN", *HASHES]
                code = 0 if mechanism in known else UNSUPPORTED
                listed = b"".join(_text(each) for each in known)
                writer.write(_framed(struct.pack(">ihi", number, code, len(known)) + listed))
                scram = Scram(self.user, self.password, HASHES[mechanism]) if mechanism in HASHES else None
            elif kind == SASL_AUTHENTICATE:
                token, is_done = body[4:], True
                try:
                    answer = b""
                    if scram is not None:
                        answer, is_done = scram.answer(token)
                    elif token.split(b"\0")[1:] != [self.user.encode(), self.password.encode()]:
                        raise PermissionError
                except PermissionError:
                    failure = struct.pack(">ih", number, REFUSED) + _text("wrong user or password") + b"\0" * 4
                    writer.write(_framed(failure + (b"\0" * 8 if version else b"")))
                    await writer.drain()
                    return False
                success = struct.pack(">ihhi", number, 0, -1, len(answer)) + answer
                writer.write(_framed(success + (b"\0" * 8 if version else b"")))
                if is_done:
                    self.logins += 1
                    return True
            else:
                return False


class Scram:
    """The server's half of RFC 5802."""

    def __init__(self, user: str, password: str, digest: str) -> None:
        self._user, self._digest, self._salt = user, digest, secrets.token_bytes(16)
        self._salted = hashlib.pbkdf2_hmac(digest, password.encode(), self._salt, ROUNDS)
        self._said = ""

    def answer(self, token: bytes) -> tuple[bytes, bool]:
        """Returns the next message, and whether it is the last one. Raises PermissionError."""
        stated = dict(part.split("=", 1) for part in token.decode().removeprefix("n,,").split(","))
        if not self._said:
            if stated["n"] != self._user:
                raise PermissionError
            first = f"r={stated['r']}{secrets.token_hex(8)},s={base64.b64encode(self._salt).decode()},i={ROUNDS}"
            self._said = f"{token.decode().removeprefix('n,,')},{first}"
            return first.encode(), False
        said = f"{self._said},{token.decode().rpartition(',p=')[0]}".encode()
        client_key = self._hmac(self._salted, b"Client Key")
        signature = self._hmac(hashlib.new(self._digest, client_key).digest(), said)
        if bytes(a ^ b for a, b in zip(base64.b64decode(stated["p"]), signature, strict=True)) != client_key:
            raise PermissionError
        proof = self._hmac(self._hmac(self._salted, b"Server Key"), said)
        return b"v=" + base64.b64encode(proof), True

    def _hmac(self, key: bytes, text: bytes) -> bytes:
        return hmac.digest(key, text, self._digest)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    if not 0 < size < MOST_BYTES:
        raise ConnectionError("this is no request of Kafka")
    return await reader.readexactly(size)


def _framed(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof() if writer.can_write_eof() else writer.close()
