"""Kills with real vLLM: one cell that reads and two that answer, several requests at a time, an engine or a proxy
killed now and then and started anew. Texts are compared with those of one engine, blocks are counted as vLLM does.

`python -m bench.prefill_decode.real_kills`: a Markdown table, in some six minutes of two processors; exit status 1 if a
request failed without a byte, a block was kept after its lease, or a text is another.
"""

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.prefill_decode.kills import Cell, Rig, Trial, run
from engine_agent.engines.vllm import kv_transfer
from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import EnginePlan
from engine_agent.protocol.states import CellRole
from tests.engine_agent.engines.vllm.running_cell import CACHE, TEXT, RunningCell, padded_artifact, plan_of

TRIAL = Trial(
    model="smollm2", prompt=TEXT * 2, tokens=12, from_tokens=16, lease_s=30.0, limit_s=300.0,
    seconds=240.0, rate=0.7, kill_every_s=40.0,
)  # fmt: skip
AT_ONCE = 8


@dataclass(eq=False)
class VllmCell(Cell):
    """A cell whose engine is vLLM."""

    plan: EnginePlan = field(kw_only=True)

    def __post_init__(self) -> None:
        home = self.folder / self.name
        home.mkdir()
        self.engine = RunningCell(self.plan, home, 1, 30.0, CellRole(self.role))
        self.ports["engine"] = self.ports["engine_admin"] = int(self.engine.url.rpartition(":")[2])
        self.ports["kv"] = self.engine.kv_port

    async def start(self, part: str) -> None:
        if part == "engine":
            self.engine.ranks = [self.engine.start(0)]
        else:
            await super().start(part)

    def is_dead(self, part: str) -> bool:
        return self.engine.ranks[0].poll() is not None if part == "engine" else super().is_dead(part)

    def kill(self, part: str) -> None:
        if part != "engine":
            super().kill(part)
            return
        for process in self.engine.parts(0):
            process.kill()

    async def end(self) -> None:
        await super().end()
        self.engine.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=TRIAL.seconds)
    parser.add_argument("--rate", type=float, default=TRIAL.rate, help="requests a second")
    parser.add_argument("--kill-every-s", type=float, default=TRIAL.kill_every_s)
    parser.add_argument("--seed", type=int, default=TRIAL.seed)
    trial = replace(TRIAL, **vars(parser.parse_args()))
    plan = plan_of(padded_artifact(install(CACHE, _say)))
    kv_transfer.install(CACHE, _say)
    with tempfile.TemporaryDirectory(prefix="prefill-decode-") as name:
        folder = Path(name)
        roles = (("prefill1", "prefill"), ("decode1", "decode"), ("decode2", "decode"))
        cells = [VllmCell(cell, role, folder, trial, plan=plan) for cell, role in roles]
        print("| what | figure |\n| --- | --- |")
        return 0 if asyncio.run(run(folder, cells, trial, _are_same)) else 1


async def _are_same(rig: Rig) -> bool:
    """Whether what was answered whole is what one engine says, with nothing of it in its cache."""
    engine = next(cell.engine for cell in rig.cells if isinstance(cell, VllmCell) and cell.role == "prefill")
    prompts, alone = list(rig.texts), dict[str, str]()
    for first in range(0, len(prompts), AT_ONCE):
        asked = prompts[first : first + AT_ONCE]
        alone |= await asyncio.to_thread(engine.texts, asked, rig.trial.tokens, cache_salt="alone", ignore_eos=True)
    same = sum(alone[prompt] == text for prompt, text in rig.texts.items())
    print(f"| texts of one engine, of those answered whole | {same} of {len(prompts)} |")
    return same == len(prompts)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
