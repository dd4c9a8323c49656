"""HAProxy's own command sockets: one command, one answer, with a time limit and a size limit.

It says what HAProxy said and turns a refusal into an error; which commands to give is for others to decide.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

COMMAND_TIMEOUT_S = 2.0
RELOAD_TIMEOUT_S = 15.0
"""A reload parses the configuration and starts a worker: 0.05 s when idle, seconds on a starved machine."""
BETWEEN = "show version"
"""Its answer, a line that is nowhere else, tells where that of one command ends and the next begins."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""`show stat` of 50,000 servers."""


class Unreachable(Exception):
    """HAProxy did not take the command, or did not answer in time."""


class CommandRefused(Exception):
    """HAProxy answered a command with an error; the text is its own."""


class CommandSocket:
    """One of HAProxy's UNIX sockets, `name` in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name

    async def ask(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Give one command and return the whole answer.

        Raises:
            Unreachable: no such socket, nobody behind it, no whole answer in time, or one over `MAX_ANSWER_BYTES`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(command)
        except TimeoutError as error:
            raise Unreachable(f"HAProxy did not answer {command[:40]!r} within {timeout_s:g} s") from error
        except (OSError, UnicodeDecodeError) as error:
            raise Unreachable(f"HAProxy's {self._name}: {error}") from error

    async def ask_all(self, *commands: str) -> list[str]:
        """Give several commands at once, which costs a tenth of asking one by one, and return the answer of each.

        Raises:
            Unreachable: as `ask`, or HAProxy did not answer each of them.
        """
        said = await self.ask("".join(f"{BETWEEN};{command};" for command in commands) + BETWEEN)
        version, _, _ = said.partition("\n")
        first, *answers, rest = re.split(rf"^{re.escape(version)}\n+", said, flags=re.MULTILINE)
        if first or rest.strip() or len(answers) != len(commands):
            raise Unreachable(f"HAProxy gave {len(answers)} answers to {len(commands)} commands")
        return answers

    async def order(self, command: str, *, success: str = "") -> None:
        """Give a command that changes something; it worked if the answer is `success`.

        Raises:
            CommandRefused: any other answer.
            Unreachable: as `ask`.
        """
        answer = (await self.ask(command)).strip()
        if answer != success:
            raise CommandRefused(f"{command.splitlines()[0][:120]}: {answer[:300]}")

    async def _exchange(self, command: str) -> str:
        with _short_path(self._folder) as folder:
            reader, writer = await asyncio.open_unix_connection(f"{folder}/{self._name}")
        try:
            writer.write(f"{command}\n".encode())
            await writer.drain()
            writer.write_eof()
            answer = await reader.read(MAX_ANSWER_BYTES)
            while not reader.at_eof():
                if len(answer) >= MAX_ANSWER_BYTES:
                    raise Unreachable(f"HAProxy's answer to {command[:40]!r} exceeds {MAX_ANSWER_BYTES} bytes")
                answer += await reader.read(MAX_ANSWER_BYTES - len(answer))
            return answer.decode()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A name of `folder` that leaves room within the 107 bytes that the path of a UNIX socket may have."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
