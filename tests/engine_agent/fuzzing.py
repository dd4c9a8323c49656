"""Sends attacks to the ingresses of a test, with good requests next to them, and reports what they harmed."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence

from tests.engine_agent.attacks.attacks import Attack
from tests.engine_agent.attacks.judge import Served, changes, complaint, servers_of
from tests.engine_agent.attacks.sending import answer_to
from tests.engine_agent.cell_proxy.proxy_process import until
from tests.engine_agent.ingress.ingresses import RunningIngress

AT_ONCE = 8
SHOWN = 40
"""Complaints in the text of a failure."""
BODY = b'{"model":"%b","max_tokens":4,"messages":[{"role":"user","content":"Say hi."}]}'


async def attacked(attacks: Iterable[Attack], *ingresses: RunningIngress) -> list[str]:
    """Sends all attacks, to each ingress in turn, several concurrently; returns what was wrong with the answers."""
    found: list[str] = []
    queue = iter(zip(attacks, itertools.cycle(ingresses), strict=False))

    async def send_some() -> None:
        for attack, ingress in queue:
            try:
                said = complaint(attack, await answer_to(attack, "127.0.0.1", ingress.settings.port))
            except TimeoutError:
                said = "no answer, and the connection stayed open"
            if said:
                found.append(f"{attack.name[:200]}: {said}")

    await asyncio.gather(*(send_some() for _ in range(AT_ONCE)))
    return found


@contextlib.asynccontextmanager
async def good_requests(ingresses: Iterable[RunningIngress], model: str, failed: list[str]) -> AsyncIterator[None]:
    """Sends one request after another to each ingress while the block runs; collects failures."""
    ends = asyncio.Event()

    async def send(ingress: RunningIngress) -> None:
        while not ends.is_set():
            answer = await ingress.post(BODY % model.encode())
            if answer.status_code != 200:
                failed.append(f"{answer.status_code} {answer.text[:200]}")

    tasks = [asyncio.create_task(send(ingress)) for ingress in ingresses]
    try:
        yield
    finally:
        ends.set()
        await asyncio.gather(*tasks)


async def servers(ingress: RunningIngress) -> dict[tuple[str, str], Served]:
    return servers_of(await ingress.haproxy.admin.send("show stat -1 4 -1"))


async def settled_servers(ingress: RunningIngress) -> dict[tuple[str, str], Served]:
    """Waits until each cell and region is up, and returns them."""

    async def none_is_down() -> bool:
        return all(each.status != "DOWN" for each in (await servers(ingress)).values())

    await until(none_is_down, "every cell and region is up")
    return await servers(ingress)


async def harm_of(attacks: Iterable[Attack], model: str, ingresses: Sequence[RunningIngress]) -> list[str]:
    """Returns everything that the attacks changed, and wrong answers."""
    before = [await settled_servers(ingress) for ingress in ingresses]
    failed: list[str] = []
    async with good_requests(ingresses, model, failed):
        found = await attacked(attacks, *ingresses)
    for ingress, servers_before in zip(ingresses, before, strict=True):
        found += changes(servers_before, await servers(ingress))
    return [f"a good request failed: {each}" for each in failed] + found


def shown(harm: list[str]) -> str:
    return f"{len(harm)}:\n" + "\n".join(harm[:SHOWN])
