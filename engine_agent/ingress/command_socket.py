"""HAProxy's command sockets: one command, one output, with limits on time and size. Returns HAProxy's text, and turns a
refusal into an error."""

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

COMMAND_TIMEOUT_S = 2.0
RELOAD_TIMEOUT_S = 15.0
"""A reload parses the configuration and starts a worker: 0.05 s when idle, seconds on a starved machine."""
SEPARATOR_COMMAND = "show version"
"""Its output, a unique line, separates the outputs of other commands."""
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""`show stat` of 50,000 servers."""
MAX_PATH_BYTES = 107
"""Of a UNIX socket (`man 7 unix`)."""


class Unreachable(Exception): ...


class CommandRefused(Exception):
    """HAProxy answered a command with an error; the text is HAProxy's."""


class CommandSocket:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name

    async def send(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Sends one command and returns its whole output. Raises Unreachable for a missing socket, one that does not
        listen, no whole output in time, or one over `MAX_OUTPUT_BYTES`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(command)
        except TimeoutError as error:
            raise Unreachable(f"HAProxy did not respond to {command[:40]!r} within {timeout_s:g} s") from error
        except (OSError, UnicodeDecodeError) as error:
            raise Unreachable(f"HAProxy's {self._name}: {error}") from error

    async def send_all(self, *commands: str) -> list[str]:
        whole = await self.send("".join(f"{SEPARATOR_COMMAND};{command};" for command in commands) + SEPARATOR_COMMAND)
        version, _, _ = whole.partition("\n")
        first, *outputs, rest = re.split(rf"^{re.escape(version)}\n+", whole, flags=re.MULTILINE)
        if first or rest.strip() or len(outputs) != len(commands):
            raise Unreachable(f"HAProxy gave {len(outputs)} outputs for {len(commands)} commands")
        return outputs

    async def execute(self, command: str, *, success: str = "") -> None:
        """Sends a command that changes something. It worked if the output is `success`. Raises CommandRefused for any
        other output. Raises Unreachable as `send`."""
        output = (await self.send(command)).strip()
        if output != success:
            raise CommandRefused(f"{command.splitlines()[0][:120]}: {output[:300]}")

    async def _exchange(self, command: str) -> str:
        with short_path(self._folder / self._name) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(f"{command}\n".encode())
            await writer.drain()
            writer.write_eof()
            output = await reader.read(MAX_OUTPUT_BYTES)
            while not reader.at_eof():
                if len(output) >= MAX_OUTPUT_BYTES:
                    raise Unreachable(f"HAProxy's output of {command[:40]!r} exceeds {MAX_OUTPUT_BYTES} bytes")
                output += await reader.read(MAX_OUTPUT_BYTES - len(output))
            return output.decode()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.contextmanager
def short_path(socket: Path) -> Iterator[str]:
    """The path of a UNIX socket, through its open folder if it is too long for the kernel. `ss` shows the path that a
    listener was bound to."""
    if len(os.fsencode(socket)) <= MAX_PATH_BYTES:
        yield str(socket)
        return
    descriptor = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{socket.name}"
    finally:
        os.close(descriptor)
