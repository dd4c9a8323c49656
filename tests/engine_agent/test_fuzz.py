"""No request harms another one, whatever it contains: attacks on two regions of real parts, with good requests next to
them (invariant I16)."""

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.engine_agent.attacks.attacks import Attack, corpus, everything, generated
from tests.engine_agent.engines.sim.cells import MODEL
from tests.engine_agent.fuzzing import harm_of, shown
from tests.engine_agent.two_regions import two_regions

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
DRAWN = 4000
"""Attacks of the fixed set, and as many mutations."""


async def harm(attacks: Iterable[Attack], folder: Path) -> list[str]:
    async with two_regions(folder) as ingresses:
        return await harm_of(attacks, MODEL, ingresses)


async def test_no_attack_of_the_corpus_harms_a_cell_or_another_request(tmp_path: Path) -> None:
    attacks = corpus(MODEL)
    assert len(attacks) > 700
    found = await harm(attacks, tmp_path)
    assert not found, shown(found)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_no_drawn_or_mutated_attack_harms_a_cell_or_another_request(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    drawn = rng.sample(list(everything(MODEL)), DRAWN)
    found = await harm([*drawn, *itertools.islice(generated(rng, MODEL), DRAWN)], tmp_path)
    assert not found, f"seed {seed}, {shown(found)}"
