"""Whatever one request contains, it does not stop vLLM: attacks on a real engine behind its proxy and an ingress."""

import contextlib
import json
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import CellEndpoint
from engine_agent.protocol.messages import Artifact
from tests.engine_agent.attacks.attacks import CHAT, COMPLETIONS, MESSAGES, Attack, bodies, members
from tests.engine_agent.cell_proxy.engine import Engine
from tests.engine_agent.cell_proxy.proxy_process import running_proxy
from tests.engine_agent.cell_proxy.test_request_work import KNOWN
from tests.engine_agent.engines.vllm.forks import Begin
from tests.engine_agent.engines.vllm.running_cell import CACHE, RunningCell, plan_of, running_cell
from tests.engine_agent.fuzzing import harm_of, shown
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.tls import fleet_of_rigs

pytestmark = [pytest.mark.long, pytest.mark.vllm]
MODEL, NODE, MAX_CONCURRENCY = "smollm2", "n-0a1b2c3d", 16
DRAWN = 4000
PATHS = (CHAT, COMPLETIONS, MESSAGES, "/v1/responses", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def engine(small: Artifact, forked: Begin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    plan = plan_of(small, max_num_seqs=MAX_CONCURRENCY)
    with running_cell(plan, tmp_path_factory.mktemp("fuzz") / "logs", nodes=1, begin=forked) as running:
        yield running


@contextlib.asynccontextmanager
async def ingress_before(cell: RunningCell, folder: Path) -> AsyncIterator[RunningIngress]:
    """An ingress and the engine's cell proxy, which takes it as healthy."""
    fleet_of_rigs().certify(folder / "node", IdentityKind.NODE, NODE)
    engine = Engine()
    engine.port = int(cell.url.rpartition(":")[2])
    options = ("--model", MODEL, "--identity", str(folder / "node"))
    async with (
        RunningIngress(folder / "home").running() as ingress,
        running_proxy(engine, *options, max_concurrency=MAX_CONCURRENCY) as proxy,
    ):
        endpoint = CellEndpoint("c-test", 3, "127.0.0.1", proxy.port, MAX_CONCURRENCY, node=NODE)
        named = pool(name=MODEL, models=(MODEL,))
        await ingress.route(msgspec.structs.replace(named, cells=(endpoint,)))
        await ingress.sees(c_test="up")
        yield ingress


async def harm(attacks: list[Attack], cell: RunningCell, folder: Path) -> list[str]:
    async with ingress_before(cell, folder) as ingress:
        return await harm_of(attacks, MODEL, [ingress])


@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_no_request_decides_which_schemas_the_next_ones_may_have(engine: RunningCell, tmp_path: Path) -> None:
    """The first schema of an engine is one that xgrammar cannot enforce. With another library for all later ones, the
    choice, which is too large for that library, would fail with 500."""
    chat = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Say a number."}]}
    odd = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "multipleOf": 7}}}
    choices = [str(number) for number in range(5000)]
    async with ingress_before(engine, tmp_path) as ingress:
        refused = await ingress.post(json.dumps({**chat, "response_format": odd}).encode())
        served = await ingress.post(json.dumps({**chat, "structured_outputs": {"choice": choices}}).encode())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value"), refused.text
    assert "`multipleOf`" in refused.json()["error"]["message"]
    assert served.status_code == 200, served.text
    assert served.json()["choices"][0]["message"]["content"] in choices


@pytest.mark.asyncio
@pytest.mark.timeout(3000)
async def test_no_attack_stops_vllm_or_another_request(engine: RunningCell, tmp_path: Path) -> None:
    attacks = [attack for path in PATHS for attack in (*bodies(path, MODEL), *members(path, MODEL))]
    seed = random.randrange(2**32)
    found = await harm(random.Random(seed).sample(attacks, DRAWN), engine, tmp_path)
    assert not found, f"seed {seed}, {shown(found)}"


READS = """
import json, sys
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
for item in json.load(sys.stdin):
    ResponsesRequest.model_validate({"model": "m", "input": [item]})
"""


def test_vllm_takes_every_item_of_a_form_that_passes_in_any_number() -> None:
    command = [str(install(CACHE, print)), "-c", READS]
    read = subprocess.run(command, input=json.dumps(KNOWN), capture_output=True, text=True, timeout=600, check=False)
    assert read.returncode == 0, read.stderr[-2000:]
