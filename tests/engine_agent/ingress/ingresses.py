"""A real ingress for tests: the agent in the test's process, around the real HAProxy."""

import asyncio
import contextlib
import csv
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from engine_agent.ingress import agent
from engine_agent.ingress.agent import IngressAgent
from engine_agent.ingress.haproxy import find_binary
from engine_agent.ingress.settings import BODY_PARSERS, BodyParserTier, IngressSettings, Times
from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import (
    Affinity,
    ApiKey,
    IngressReport,
    Pool,
    RoutingTable,
    SpillTarget,
    Split,
)
from engine_agent.protocol.ports import hop_port
from engine_agent.protocol.request_messages import RequestWindow
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.tls import fleet_of_rigs, identity_of
from tests.ports import free_ingress_port

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# Each step of a test waits for the next pass of the agent, and for its next reading of HAProxy.
agent.POLL_S, agent.READ_IDLE_EVERY_S, agent.REST_S = 0.1, 0.25, 0.25

HOP_SECRET = "f" * 40
HOME = "us-east-1"
CHECK_INTERVAL_MS = Times().check_interval_ms
AWAY = "us-west-2"


def waits(headers: Mapping[str, str], most_s: int = 7) -> bool:
    """Whether an answer has a valid Retry-After: from half of `most_s` to `most_s`."""
    return most_s // 2 <= int(headers["retry-after"]) <= most_s


def pool(
    *cells: FakeCell,
    name: str = "demo",
    models: tuple[str, ...] = ("demo",),
    spill: Iterable["RunningIngress"] = (),
    fractions: dict[str, float] | None = None,
    draining: Iterable[FakeCell] = (),
    serving_class: str = "realtime",
    affinity: Affinity | None = None,
    continues: bool = False,
) -> Pool:
    drained = set(draining)
    return Pool(
        name=name,
        models=models,
        serving_class=serving_class,
        cells=tuple(cell.endpoint(drain=cell in drained) for cell in cells),
        spill=tuple(
            SpillTarget(other.settings.region, "127.0.0.1", other.settings.port, other.settings.ingress_id)
            for other in spill
        ),
        fractions=fractions or {},
        affinity=affinity,
        continues=continues,
    )


class RunningIngress:
    """One ingress and its reports. By default it has one body parser instead of two: each is a HAProxy to start."""

    def __init__(
        self,
        home: Path,
        region: str = HOME,
        ingress_id: str = "",
        *,
        check_interval_ms: int = CHECK_INTERVAL_MS,
        body_parsers: tuple[BodyParserTier, ...] = BODY_PARSERS[-1:],
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        ingress_id = ingress_id or f"i-{region}"
        self.identity = fleet_of_rigs().certify(home, IdentityKind.INGRESS, ingress_id)
        # An interval also limits the TLS handshake of its check, and the cells run in the event loop of the test. With
        # eight checks, a socket that they close is noticed within two seconds, and a loop may be busy for eight.
        checks = 8 if check_interval_ms == CHECK_INTERVAL_MS else Times().failed_checks
        times = Times(connect_s=10, check_interval_ms=check_interval_ms, check_timeout_ms=10_000, failed_checks=checks)
        port = free_ingress_port()
        self.use(
            IngressSettings(
                ingress_id,
                region,
                home,
                port=port,
                max_connections=1000,
                body_parsers=body_parsers,
                times=times,
            )
        )
        self.reports: list[IngressReport] = []
        self.windows: list[RequestWindow] = []
        self.revision = 0
        self.hop_secrets: tuple[str, ...] = (HOP_SECRET,)
        self.http: httpx.AsyncClient
        self._task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def use(self, settings: IngressSettings) -> None:
        """Replaces the agent by one with these settings, like a restart."""
        self.settings = settings
        self.ingress = IngressAgent(settings, find_binary(), identity=self.identity)
        self.haproxy = self.ingress.serving.process

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["RunningIngress"]:
        """Runs until the block ends, then kills HAProxy."""
        self._task = asyncio.create_task(self.ingress.run(self.reports.append, self.windows.append))
        try:
            await eventually(lambda: self.reports and self.reports[-1].observed.haproxy_pid)
            async with httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False) as self.http:
                yield self
        finally:
            try:
                await self.die()
            finally:
                await self.haproxy.kill()
                for parser in self.ingress.body_parsers:
                    await parser.process.kill()
                await self.ingress.grpc.stop()
                await self.ingress.relays.stop()

    async def die(self) -> None:
        """Stops the agent and leaves HAProxy running, like kill -9."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def route(
        self,
        *pools: Pool,
        retry_after_s: int = 7,
        splits: tuple[Split, ...] = (),
        keys: tuple[ApiKey, ...] = (),
        keys_required: bool = False,
        tenants_over_quota: tuple[str, ...] = (),
        grpc: bool = False,
        ingresses: tuple[str, ...] = (),
    ) -> None:
        """Puts a table with these pools into force, and waits until every cell has a state."""
        self.revision += 1
        region = self.settings.region
        self.ingress.receive(
            RoutingTable(
                self.revision,
                region,
                pools,
                splits=splits,
                keys=keys,
                keys_required=keys_required,
                tenants_over_quota=tenants_over_quota,
                hop_secrets=self.hop_secrets,
                retry_after_s=retry_after_s,
                grpc=grpc,
                ingresses=ingresses,
            )
        )
        await eventually(self._is_in_force, what=f"revision {self.revision} in force")
        await self._sees_body_parsers()

    async def _sees_body_parsers(self) -> None:
        """They start next to HAProxy, which serves short bodies meanwhile."""
        parsers = {tier.name for tier in self.settings.body_parsers}
        async with asyncio.timeout(60):
            while parsers:
                rows = csv.DictReader((await self.haproxy.admin.send("show stat -1 4 -1")).lstrip("# ").splitlines())
                parsers -= {row["pxname"] for row in rows if row["status"].startswith("UP") and row["check_status"]}
                await asyncio.sleep(0.01)

    def _is_in_force(self) -> bool:
        reason = self.reports[-1].observed.reason
        assert f"revision {self.revision} refused" not in reason, reason
        return self.revision_in_force == self.revision and "unknown" not in self.cells.values()

    async def sees(self, **cells: str) -> None:
        """Waits until HAProxy sees these cells in these states (underscores stand for hyphens)."""
        wanted = {name.replace("_", "-"): state for name, state in cells.items()}
        await eventually(lambda: wanted.items() <= self.cells.items(), what=f"{wanted} in {self.cells}")

    @property
    def revision_in_force(self) -> int:
        return self.reports[-1].observed.revision

    @property
    def cells(self) -> dict[str, str]:
        return self.reports[-1].observed.cells

    @property
    def worker_pid(self) -> int:
        pid = self.reports[-1].telemetry.worker_pid
        assert pid is not None
        return pid

    @property
    def running_servers(self) -> list[str]:
        running = self.ingress.serving.running
        return [server.name for server in running.servers] if running else []

    async def post(self, body: bytes, **headers: str) -> httpx.Response:
        """Sends these bytes, well-formed or not."""
        return await self.http.post("/v1/chat/completions", content=body, headers=headers)

    async def post_hop(self, body: bytes, sender: Identity | None = None, /, **headers: str) -> httpx.Response:
        """The same on the port for other regions' ingresses, with this certificate."""
        sender = sender or identity_of(IdentityKind.INGRESS, "i-elsewhere")
        url = f"https://127.0.0.1:{hop_port(self.settings.port)}/v1/chat/completions"
        name = fleet_of_rigs().name(IdentityKind.INGRESS, self.settings.ingress_id).dns
        async with httpx.AsyncClient(verify=sender.client_context(), timeout=60, trust_env=False) as client:
            return await client.post(url, content=body, headers=headers, extensions={"sni_hostname": name})

    @contextlib.asynccontextmanager
    async def client(self, *, max_retries: int = 0) -> "AsyncIterator[AsyncOpenAI]":
        from openai import AsyncOpenAI  # takes long to load: not while tests are collected

        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=max_retries) as client:
            yield client


async def ask(client: "AsyncOpenAI", model: str = "demo", text: str = "hi") -> str:
    """One answer: the name of its cell."""
    answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


async def read_stream(client: "AsyncOpenAI", model: str = "demo") -> str:
    """The text of one streamed answer, read to its end."""
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
