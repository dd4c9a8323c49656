"""Whether every token is counted: mixed requests through a whole ingress and its cells, some of them cancelled, beside
what the engines' own counters say.

    .venv/bin/python -m bench.token_drift --requests 2000 --cancelled 400 --cells 3 --killed 1
    .venv/bin/python -m bench.token_drift --engine vllm --requests 200 --cancelled 40

Real engines, cell proxies and HAProxy on this machine; no control plane. It prints, for each cell, tokens by its engine
and by its proxy, and ends with 1 if they differ. A cell that is killed takes its engine's counters with it: of that it
prints what its proxy counted, and how much of it is estimated.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec

from engine_agent.ingress.agent import IngressAgent
from engine_agent.ingress.haproxy import find_binary
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.ingress_messages import CellEndpoint, IngressReport, Pool, RoutingTable
from engine_agent.protocol.messages import TokenCheck, UsageRow
from tests.engine_agent.engines.sim.cells import MODEL as SIM_MODEL
from tests.engine_agent.engines.sim.cells import Cell as SimCell
from tests.engine_agent.ingress.keyed import Keyed, keyed
from tests.engine_agent.proxy.engine import Engine
from tests.engine_agent.proxy.proxy_process import ProxyProcess, running_proxy
from tests.ports import free_ingress_port

SLOTS = 8
LONG = 1500
"""Tokens that a request wants whose client leaves."""
LEAVES_WITHIN_S = (0.05, 2.0)
"""Of a client that does not wait for a piece: before its request is at a cell, or while that is at work."""
WAIT_S = 1800.0
VLLM_MODEL = "smollm2"
WORDS = ("the", "capital", "of", "France", "is", "Paris", "and", "trains", "run", "on", "rails", "between", "cities")


class Form:
    """One kind of request: `path`, and what its body has beside model and prompt."""

    def __init__(self, path: str, weight: int = 1, **more: Any) -> None:
        self.path, self.weight, self.more = path, weight, more

    def body(self, model: str, chance: random.Random) -> dict[str, Any]:
        text = " ".join(chance.choices(WORDS, k=chance.randint(3, 40)))
        limit = chance.randint(2, 24)
        if "completions" not in self.path or "chat" in self.path:
            return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": limit, **self.more}
        return {"model": model, "prompt": text, "max_tokens": limit, **self.more}


class ResponsesForm(Form):
    """Of `/v1/responses`."""

    def body(self, model: str, chance: random.Random) -> dict[str, Any]:
        text = " ".join(chance.choices(WORDS, k=chance.randint(3, 40)))
        limit = chance.randint(16, 24)
        return {"model": model, "input": text, "max_output_tokens": limit, "store": False, **self.more}


class Continuation(Form):
    """A chat whose last message is the beginning of the answer."""

    def body(self, model: str, chance: random.Random) -> dict[str, Any]:
        asked = super().body(model, chance)
        begun = {"role": "assistant", "content": " ".join(chance.choices(WORDS, k=chance.randint(1, 8)))}
        more = {"continue_final_message": True, "add_generation_prompt": False}
        return {**asked, "messages": [*asked["messages"], begun], **more}


class SeveralPrompts(Form):
    """Several prompts in one request."""

    def body(self, model: str, chance: random.Random) -> dict[str, Any]:
        prompts = [" ".join(chance.choices(WORDS, k=chance.randint(3, 20))) for _ in range(3)]
        return {"model": model, "prompt": prompts, "max_tokens": chance.randint(2, 12), **self.more}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"usage": {"type": "integer"}}, "required": ["usage"]}
FORMS = (
    Form(CHAT, 3, stream=True),
    Form(CHAT, 2),
    Form(COMPLETIONS, 3, stream=True),
    Form(COMPLETIONS, 2),
    Form(CHAT, 1, stream=True, stream_options={"include_usage": True}),
    Continuation(CHAT),
    Continuation(CHAT, stream=True),
    Form(COMPLETIONS, n=3),
    Form(COMPLETIONS, n=2, stream=True),
    Form(COMPLETIONS, stop=["the", "of"]),
    Form(COMPLETIONS, prompt_logprobs=5),
    Form(CHAT, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    Form(CHAT, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    SeveralPrompts(COMPLETIONS),
    SeveralPrompts(COMPLETIONS, stream=True),
    ResponsesForm("/v1/responses"),
    ResponsesForm("/v1/responses", stream=True),
    Form("/v1/messages"),
    Form("/v1/messages", stream=True),
)


@contextmanager
def sim_engine(home: Path) -> Iterator[str]:
    """One simulator, and its address."""
    home.mkdir()
    cell = SimCell(home, followers=0)
    try:
        yield cell.start(0, "--max-num-seqs", str(SLOTS)).url
    finally:
        cell.stop()


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


def engine_at(url: str) -> Engine:
    """As `running_proxy` takes one: it only asks for the port."""
    engine = Engine()
    engine.port = int(url.rpartition(":")[2])
    return engine


@asynccontextmanager
async def ingress(home: Path, cells: list[CellEndpoint], model: str, key: Keyed) -> AsyncIterator[str]:
    """A whole ingress in front of these cells, and its address; `home` is an empty folder."""
    settings = IngressSettings("i-east", "east", home, port=free_ingress_port(), max_connections=1000)
    agent = IngressAgent(settings, find_binary())
    reports: list[IngressReport] = []
    running = asyncio.create_task(agent.run(reports.append))
    try:
        await until(lambda: bool(reports and reports[-1].observed.haproxy_pid))
        pool = Pool(model, (model,), "realtime", tuple(cells), (), {"east": 1.0})
        agent.receive(RoutingTable(1, "east", (pool,), keys=(key.entry,), keys_required=True))
        wanted = {cell.cell: "up" for cell in cells}
        await until(lambda: reports[-1].observed.cells == wanted)
        yield f"http://127.0.0.1:{settings.port}"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await agent.serving.process.kill()
        for parser in agent.body_parsers:
            await parser.process.kill()


async def send(
    http: httpx.AsyncClient, form: Form, body: dict[str, Any], key: Keyed, leaves_after: int | None, within_s: float
) -> str:
    """One request, read to its end or left after so many pieces (0: after `within_s`); how it ended."""
    try:
        async with asyncio.timeout(within_s if leaves_after == 0 else None):
            async with http.stream("POST", form.path, json=body, headers=key.headers) as answer:
                pieces = 0
                async for _ in answer.aiter_raw():
                    pieces += 1
                    if leaves_after and pieces >= leaves_after:
                        return "left"
                return str(answer.status_code)
    except (TimeoutError, httpx.TransportError) as error:
        return "left" if leaves_after == 0 else type(error).__name__


def say(text: str) -> None:
    """How far it is, for who waits."""
    print(text, file=sys.stderr, flush=True)


async def usage_of(proxy: ProxyProcess) -> tuple[list[UsageRow], TokenCheck | None]:
    load = (await proxy.status())["load"]
    rows = msgspec.convert(load["usage"], list[UsageRow])
    return rows, msgspec.convert(load["token_check"], TokenCheck | None)


async def until_checked(proxy: ProxyProcess, since: float = 0.0) -> tuple[list[UsageRow], TokenCheck]:
    """Once everything is settled and has been compared; `since`: by a comparison that began then.

    Raises:
        SystemExit: it began anew on the way, so it is about a part of the requests.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            rows, check = await usage_of(proxy)
            if check and since and check.since != since:
                raise SystemExit("a probe of the cell did not say what it used, so its comparison began anew: again")
            prompt = sum(row.prompt_tokens_total for row in rows)
            if check and not any(row.in_flight for row in rows) and check.counted_prompt_total == prompt:
                return rows, check
            await asyncio.sleep(0.5)


def describe(name: str, rows: list[UsageRow], check: TokenCheck | None) -> int:
    """Print a cell; returns its drift in tokens."""
    total = {
        field: sum(getattr(row, field) for row in rows)
        for field in ("requests_total", "cancelled_total", "errors_total", "estimated_total", "cached_tokens_total")
    }
    ours = [sum(getattr(row, f"{kind}_tokens_total") for row in rows) for kind in ("prompt", "completion")]
    print(f"{name}:", ", ".join(f"{field.removesuffix('_total')} {value}" for field, value in total.items()))
    print(f"  counted {ours[0]} prompt and {ours[1]} completion tokens")
    if check is None:
        return 0
    theirs = [check.engine_prompt_total, check.engine_completion_total]
    drift = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"  engine  {theirs[0]} prompt and {theirs[1]} completion tokens: {drift} apart")
    return drift


async def run(options: argparse.Namespace) -> int:
    chance = random.Random(options.seed)
    is_vllm = options.engine == "vllm"
    model = VLLM_MODEL if is_vllm else SIM_MODEL
    key = keyed("0a0b0c0d", tokens_per_min=2**30)
    async with AsyncExitStack() as stack:
        home, gate = (Path(stack.enter_context(TemporaryDirectory())) for _ in range(2))
        engines = stack.enter_context(ExitStack())
        urls = [options.engine_url] if options.engine_url else _engines(options, home, engines)
        proxies = []
        for number, url in enumerate(urls):
            more = ("--cell", f"c-{number}", "--model", model)
            proxies.append(await stack.enter_async_context(running_proxy(engine_at(url), *more, max_concurrency=SLOTS)))
        cells = [CellEndpoint(f"c-{n}", 3, "127.0.0.1", proxy.port, SLOTS) for n, proxy in enumerate(proxies)]
        say("engines and cell proxies run")
        since = [(await until_checked(proxy))[1].since for proxy in proxies]
        say("their counts are compared from here on")
        url = await stack.enter_async_context(ingress(gate, cells, model, key))
        say("the ingress serves")
        ends = await _send_all(options, chance, model, url, key, urls)
        print(f"seed {options.seed}; how requests ended: {dict(sorted(ends.items()))}")
        drift = 0
        for number, proxy in enumerate(proxies):
            dead = number < options.killed
            rows, check = await (usage_of(proxy) if dead else until_checked(proxy, since[number]))
            drift += describe(f"c-{number}{' (killed)' if dead else ''}", rows, None if dead else check)
        print(f"drift: {drift} tokens")
        return int(drift != 0)


def _engines(options: argparse.Namespace, home: Path, stack: ExitStack) -> list[str]:
    if options.engine == "sim":
        return [stack.enter_context(sim_engine(home / f"engine-{number}")) for number in range(options.cells)]
    from tests.engine_agent.engines.vllm import running_cell as vllm

    artifact = vllm.padded_artifact(vllm.engine_pythons(vllm.CACHE)["vllm"])
    plan = vllm.plan_of(artifact, max_num_seqs=SLOTS)
    return [stack.enter_context(vllm.running_cell(plan, home / "vllm", nodes=1)).url]


async def _send_all(
    options: argparse.Namespace,
    chance: random.Random,
    model: str,
    url: str,
    key: Keyed,
    engines: list[str],
) -> Counter[str]:
    leaving = set(chance.sample(range(options.requests), options.cancelled))
    kills = set(chance.sample(range(options.requests // 4, options.requests // 2), options.killed))
    ends: Counter[str] = Counter()
    # As many as the cells that live have places for: a real engine on a few cores takes longer than requests wait.
    at_once = SLOTS * max(1, len(engines) - options.killed)
    slots = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False, limits=limits) as http:

        async def one(number: int) -> None:
            form = chance.choices(FORMS, [form.weight for form in FORMS])[0]
            body = form.body(model, chance)
            leaves = chance.choice([0, 1, 1, 2, 4]) if number in leaving else None
            if leaves and not form.more.get("stream"):
                leaves = 0  # its first piece would be its whole answer
            within_s = chance.uniform(*LEAVES_WITHIN_S)
            if leaves is not None:  # so that there is something to leave
                body |= {name: LONG for name in ("max_tokens", "max_output_tokens") if name in body}
                body |= {"ignore_eos": True} if "completions" in form.path else {}
            async with slots:
                end = await send(http, form, body, key, leaves, within_s)
                ends[end] += 1
                if end not in {"200", "left"}:
                    ends[f"{end} {form.path} {sorted(form.more)}"] += 1
                if number in kills:
                    await asyncio.to_thread(_kill, engines[len([k for k in kills if k < number])])

        await asyncio.gather(*(one(number) for number in range(options.requests)))
    return ends


def _kill(url: str) -> None:
    """The engine at this address dies at once."""
    import psutil

    port = int(url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            psutil.Process(connection.pid).kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--engine-url", default="", help="an engine that runs already; else one is started")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--cancelled", type=int, default=40)
    parser.add_argument("--cells", type=int, default=1)
    parser.add_argument("--killed", type=int, default=0, help="so many cells' engines are killed on the way (sim)")
    parser.add_argument("--seed", type=int, default=7)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
