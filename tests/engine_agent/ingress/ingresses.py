"""A real ingress for tests: the agent's own loop in the test's process, around the real HAProxy."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from engine_agent.ingress.agent import Ingress
from engine_agent.ingress.haproxy import HaproxyProcess, find_binary
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.messages import IngressReport, Pool, RoutingTable, SpillTarget
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell

HOME = "us-east-1"
AWAY = "us-west-2"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def pool(
    *cells: FakeCell,
    name: str = "demo",
    models: tuple[str, ...] = ("demo",),
    spill: Iterable["RunningIngress"] = (),
    fractions: dict[str, float] | None = None,
    draining: Iterable[FakeCell] = (),
    serving_class: str = "realtime",
) -> Pool:
    drained = set(draining)
    return Pool(
        name=name,
        models=models,
        serving_class=serving_class,
        cells=tuple(cell.endpoint(drain=cell in drained) for cell in cells),
        spill=tuple(SpillTarget(gate.settings.region, "127.0.0.1", gate.settings.port) for gate in spill),
        fractions=fractions or {},
    )


class RunningIngress:
    """One ingress and what it reported."""

    def __init__(self, home: Path, region: str = HOME) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.settings = IngressSettings(
            ingress_id=f"i-{region}", region=region, home=home, port=free_port(), max_connections=1000
        )
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self.haproxy = HaproxyProcess(self.settings, find_binary())
        self.ingress = Ingress(self.settings, self.haproxy)
        self.reports: list[IngressReport] = []
        self.revision = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["RunningIngress"]:
        """Tend until the block ends; then HAProxy is ended too."""
        task = asyncio.create_task(self.ingress.tend(self.reports.append))
        try:
            await eventually(lambda: self.reports and self.reports[-1].observed.haproxy_pid)
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self.haproxy.kill()

    async def route(self, *pools: Pool, retry_after_s: int = 7) -> None:
        """Have a table with these pools in force, and every cell of it seen in a state."""
        self.revision += 1
        region = self.settings.region
        self.ingress.take(RoutingTable(self.revision, region, pools, retry_after_s=retry_after_s))
        await eventually(self._is_in_force, what=f"revision {self.revision} in force")

    def _is_in_force(self) -> bool:
        assert "refused" not in self.reports[-1].observed.reason, self.reports[-1].observed.reason
        return self.revision_in_force == self.revision and "unknown" not in self.cells.values()

    async def sees(self, **cells: str) -> None:
        """Wait until HAProxy sees these cells (underscores stand for hyphens) as said."""
        wanted = {name.replace("_", "-"): state for name, state in cells.items()}
        await eventually(lambda: wanted.items() <= self.cells.items(), what=f"{wanted} in {self.cells}")

    @property
    def revision_in_force(self) -> int:
        return self.reports[-1].observed.revision

    @property
    def cells(self) -> dict[str, str]:
        return self.reports[-1].observed.cells

    @contextlib.asynccontextmanager
    async def client(self, *, max_retries: int = 0) -> AsyncIterator[AsyncOpenAI]:
        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=max_retries) as client:
            yield client


async def ask(client: AsyncOpenAI, model: str = "demo", text: str = "hi") -> str:
    """One answer: the name of the cell that gave it."""
    answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


async def read_stream(client: AsyncOpenAI, model: str = "demo") -> str:
    """The text of one streamed answer, read to its end."""
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def post(url: str, body: bytes, **headers: str) -> httpx.Response:
    """A request as it is, well-formed or not."""
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{url}/v1/chat/completions", content=body, headers=headers)
