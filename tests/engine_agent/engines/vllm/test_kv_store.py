"""A store of KV blocks with real vLLM: engines find what a killed one has computed; tenants find only their own."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_agent.engines.vllm.kv_transfer import GIB, STORE_FOLDER
from engine_agent.protocol.messages import Artifact
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.forks import Begin, started
from tests.engine_agent.engines.vllm.running_cell import ANSWER_LIMIT_S, TEXT, RunningCell, plan_of

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

LIMIT_GIB = 0.1
PROMPTS = tuple(f"Document {number}. " + TEXT * 12 for number in range(3))
"""Some 300 tokens each: two blocks of 128, and a rest that is always computed."""
BLOCK, NEW = 128, 16
KINDS = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Cells:
    """Cells on one machine, one after the other."""

    def __init__(self, home: Path, artifact: Artifact, begin: Begin, workers: int) -> None:
        self._home, self._begin = home, begin
        self._plan = plan_of(artifact, workers=workers, kv_store_size=LIMIT_GIB, kv_offloading_size=0.1)
        self._cells: list[RunningCell] = []
        self.folder = home / STORE_FOLDER

    def start(self) -> RunningCell:
        cell = RunningCell(self._plan, self._home, 1, 30.0, begin=self._begin)
        self._cells.append(cell)
        cell.start_all()
        return cell

    def end(self) -> None:
        while self._cells:
            self._cells.pop().end()

    def blocks(self) -> list[Path]:
        return sorted(self.folder.rglob("*.bin"))

    def bytes(self) -> int:
        """Without blocks that are deleted meanwhile."""
        total = 0
        for block in self.blocks():
            with contextlib.suppress(FileNotFoundError):
                total += block.stat().st_blocks * 512
        return total


@pytest.fixture
def cells(request: pytest.FixtureRequest, tmp_path: Path, small: Artifact, forked: Begin) -> Iterator[Cells]:
    workers = request.param
    made = Cells(tmp_path, small, forked if workers == 1 else started, workers)
    yield made
    made.end()


def read_tokens(cell: RunningCell) -> dict[str, int]:
    """Prompt tokens by where their KV values came from."""
    lines = CLIENT.get(f"{cell.url}/metrics", timeout=ANSWER_LIMIT_S).text.splitlines()
    found = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total{")]
    return {kind: sum(int(float(line.split()[-1])) for line in found if f'source="{kind}"' in line) for kind in KINDS}


@pytest.mark.parametrize("cells", [1, 2], indirect=True, ids=["one worker", "two workers"])
def test_an_engine_finds_what_a_killed_one_has_computed(cells: Cells) -> None:
    first = cells.start()
    tokens = [first.tokens(prompt, NEW, cache_salt="a") for prompt in PROMPTS]
    computed = read_tokens(first)
    first.wait_until(lambda: len(cells.blocks()) == 2 * len(PROMPTS), ANSWER_LIMIT_S)
    maps = [line for part in first.parts(0) for line in Path(f"/proc/{part.pid}/maps").read_text().splitlines()]
    memory = [line for line in maps if "/dev/shm/vllm_offload_" in line]
    assert memory, "blocks pass through no shared memory"
    assert all(line.endswith(" (deleted)") for line in memory), "a killed engine leaves its memory behind"
    cells.end()  # by SIGKILL
    assert cells.folder.stat().st_mode & 0o777 == 0o700

    second = cells.start()
    assert [second.tokens(prompt, NEW, cache_salt="a") for prompt in PROMPTS] == tokens
    found = read_tokens(second)
    log.info("first engine %s, second engine %s", computed, found)
    assert found["external_kv_transfer"] == 2 * BLOCK * len(PROMPTS)
    assert computed == {**computed, "external_kv_transfer": 0, "local_cache_hit": 0}
    assert found["local_compute"] == computed["local_compute"] - found["external_kv_transfer"]

    # A tenant with another salt finds nothing, whatever is in the files.
    assert second.tokens(PROMPTS[0], NEW, cache_salt="b") == tokens[0]
    assert read_tokens(second)["external_kv_transfer"] == found["external_kv_transfer"]
    cells.end()

    # Shortened and deleted files are computed again.
    for block in cells.blocks()[::2]:
        os.truncate(block, 100)
    for block in cells.blocks()[1::4]:
        block.unlink()
    third = cells.start()
    assert [third.tokens(prompt, NEW, cache_salt="a") for prompt in PROMPTS] == tokens
    assert read_tokens(third)["external_kv_transfer"] < found["external_kv_transfer"]


@pytest.mark.parametrize("cells", [1], indirect=True)
def test_the_files_keep_their_limit(cells: Cells) -> None:
    cell = cells.start()
    cell.tokens(PROMPTS[0], NEW)
    cell.wait_until(lambda: bool(cells.blocks()), ANSWER_LIMIT_S)
    of_a_block = cells.blocks()[0].stat().st_size
    needed = int(1.5 * LIMIT_GIB * GIB / of_a_block)
    for number in range(0, needed, 4):
        cell.texts([f"{number + at}: " + TEXT * 6 for at in range(4)], 2)
    cell.wait_until(lambda: cells.bytes() <= LIMIT_GIB * GIB, ANSWER_LIMIT_S)
    assert cells.bytes() > LIMIT_GIB * GIB / 2
    log.info("%d blocks of %d bytes", len(cells.blocks()), of_a_block)
