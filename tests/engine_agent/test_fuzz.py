"""Whatever one request contains, it harms nobody else: the fixed corpus of attacks against two regions of real parts,
with good requests beside it (invariant I16)."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from bench.fuzz.attacks import Attack, corpus, everything, generated
from bench.fuzz.judge import Served, changes, complaint, servers_of
from bench.fuzz.sending import answer_to
from tests.engine_agent.engines.sim.cells import MODEL
from tests.engine_agent.ingress.ingresses import RunningIngress
from tests.engine_agent.two_regions import two_regions

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
AT_ONCE = 8
GOOD = b'{"model":"%b","max_tokens":4,"messages":[{"role":"user","content":"Say hi."}]}' % MODEL.encode()
SHOWN = 40
"""Complaints in the text of a failure."""


async def attacked(attacks: Iterable[Attack], *ingresses: RunningIngress) -> list[str]:
    """Send all attacks, to each ingress in turn, some at once; what was wrong with the answers."""
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
async def good_requests(ingresses: Iterable[RunningIngress], failed: list[str]) -> AsyncIterator[None]:
    """One after another to each ingress while the block runs; what failed."""
    ends = asyncio.Event()

    async def send(ingress: RunningIngress) -> None:
        while not ends.is_set():
            answer = await ingress.post(GOOD)
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


async def harm_of(attacks: Iterable[Attack], folder: Path) -> list[str]:
    """Everything that the attacks changed or that answered wrongly."""
    async with two_regions(folder) as ingresses:
        before = [await servers(ingress) for ingress in ingresses]
        failed: list[str] = []
        async with good_requests(ingresses, failed):
            found = await attacked(attacks, *ingresses)
        for ingress, servers_before in zip(ingresses, before, strict=True):
            found += changes(servers_before, await servers(ingress))
            found += [report.observed.reason for report in ingress.reports if report.observed.reason]
        return [f"a good request failed: {each}" for each in failed] + found


async def test_no_attack_of_the_corpus_harms_a_cell_or_another_request(tmp_path: Path) -> None:
    attacks = corpus(MODEL)
    assert len(attacks) > 700
    harm = await harm_of(attacks, tmp_path)
    assert not harm, f"{len(harm)}:\n" + "\n".join(harm[:SHOWN])


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_no_attack_on_any_path_harms_a_cell_or_another_request(tmp_path: Path) -> None:
    harm = await harm_of(everything(MODEL), tmp_path)
    assert not harm, f"{len(harm)}:\n" + "\n".join(harm[:SHOWN])


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_no_mutated_attack_harms_a_cell_or_another_request(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    harm = await harm_of(itertools.islice(generated(random.Random(seed), MODEL), 5000), tmp_path)
    assert not harm, f"seed {seed}, {len(harm)}:\n" + "\n".join(harm[:SHOWN])
