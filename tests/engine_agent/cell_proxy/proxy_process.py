"""A real proxy process for tests."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine_agent.protocol.load_messages import UsageRow
from tests.engine_agent.cell_proxy.engine import Engine
from tests.engine_agent.cell_proxy.http_stream import Message, ask, request
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0
_POLL_S = 0.01


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], what: str) -> None:
    """Polls until `condition` holds. Fails with `what` at the deadline."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"still not after {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(_POLL_S)


class ProxyProcess:
    """A running proxy and its two ports."""

    def __init__(self, process: asyncio.subprocess.Process, ports: list[int], log: Path) -> None:
        self.process = process
        self.port, self.admin_port = ports
        self._log = log

    async def ask(self, raw: bytes) -> Message:
        return await ask(self.port, raw)

    async def complete(self, body: bytes = b"{}", **headers: str) -> Message:
        """`POST /v1/completions`."""
        return await ask(self.port, request("/v1/completions", body, **headers))

    async def admin(self, path: str, body: bytes | None = None) -> Message:
        return await ask(self.admin_port, request(path, body))

    async def status(self, query: str = "") -> dict[str, Any]:
        status: dict[str, Any] = (await self.admin(f"/status{query}")).json()
        return status

    async def usage(self, tenant: str = "acme") -> UsageRow:
        rows = msgspec.convert((await self.status())["load"]["usage"], tuple[UsageRow, ...])
        (row,) = (row for row in rows if row.tenant == tenant)
        return row

    async def health_check(self, server: str = "c-test-g3") -> tuple[int, str]:
        """The result of the health check: the status, and the code of an error."""
        answer = await self.ask(request("/healthz", x_switchyard_server=server))
        return answer.status, answer.json().get("error", {}).get("message", "")

    async def is_healthy(self) -> bool:
        try:
            return bool((await self.status())["health"]["ok"])
        except OSError:
            return False

    async def is_unhealthy(self) -> bool:
        return not await self.is_healthy()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        lines = [msgspec.json.decode(line) for line in self._log.read_bytes().splitlines()]
        return [line for line in lines if line["event"] == event]


@asynccontextmanager
async def running_proxy(
    engine: Engine, *options: str, max_concurrency: int = 4, wait: bool = True
) -> AsyncIterator[ProxyProcess]:
    """A proxy in front of `engine`, healthy unless `wait` is False. Killed at the end if necessary."""
    ports = [free_port(), free_port()]
    named = {
        "--node-id": "n-0a1b2c3d",
        "--cell": "c-test",
        "--generation": "3",
        "--port": str(ports[0]),
        "--admin-port": str(ports[1]),
        "--engine": f"http://127.0.0.1:{engine.port}",
        "--model": "tiny",
        "--max-concurrency": str(max_concurrency),
    }
    arguments = [word for pair in named.items() for word in pair]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "proxy.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "engine_agent.cell_proxy", *arguments, *options,
                stdout=output, cwd=ROOT, env={**os.environ, "SWITCHYARD_NODE_ID": "n-0a1b2c3d"},
            )  # fmt: skip
        proxy = ProxyProcess(process, ports, log)
        try:
            if wait:
                await until(proxy.is_healthy, "the proxy finds its engine healthy")
            yield proxy
        except AssertionError as error:
            error.add_note(f"exit status {process.returncode}, log: {log.read_text(errors='replace')[-4000:]}")
            raise
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
