"""A prefill and a decode cell of real vLLM with their proxies: texts beside those of one engine, and what the decode
cell answers when the engine that reads is killed after its answer, and before one.

`python -m bench.prefill_decode.real`: a Markdown table, in two minutes of two processors; exit status 1 where a text is
another or a request failed. It installs vLLM's environment and what hands over (`kv_transfer`) into the cache if they
are missing.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from engine_agent.engines.vllm import kv_transfer
from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import HandoverLoad, PrefillCell
from engine_agent.protocol.pairs import Pairs
from engine_agent.protocol.states import CellRole
from engine_agent.proxy.prefill_protocol import prefill_members
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.running_cell import (
    ANSWER_LIMIT_S,
    CACHE,
    PROMPTS,
    TOKENS,
    RunningCell,
    padded_artifact,
    plan_of,
    running_cell,
)
from tests.engine_agent.proxy.engine import Engine
from tests.engine_agent.proxy.http_stream import Message, request
from tests.engine_agent.proxy.proxy_process import ProxyProcess, running_proxy

PATH, LAYOUT = "/v1/completions", "a94f01c2"
FROM_TOKENS = 16
ASKED = PROMPTS[1::2]
LONG = PROMPTS[-1]
OPTIONS = ("--model", "smollm2", "--max-concurrency", "16", "--kv-layout", LAYOUT, "--prefill-timeout-s", "120")


def main() -> int:
    plan = plan_of(padded_artifact(install(CACHE, _say)))
    kv_transfer.install(CACHE, _say)
    with tempfile.TemporaryDirectory(prefix="prefill-decode-") as folder:
        home = Path(folder)
        with (
            running_cell(plan, home / "prefill", nodes=1, role=CellRole.PREFILL) as prefill,
            running_cell(plan, home / "decode", nodes=1, role=CellRole.DECODE) as decode,
        ):
            return 0 if asyncio.run(_scenario(prefill, decode)) else 1


async def _scenario(prefill: RunningCell, decode: RunningCell) -> bool:
    # What one engine makes of them by itself, and leaves for nobody in its cache.
    alone = await asyncio.to_thread(prefill.texts, ASKED, TOKENS, cache_salt="alone", ignore_eos=True)
    async with (
        running_proxy(_before(prefill), *OPTIONS, "--cell", "c-p", "--cell-role", "prefill") as reads,
        running_proxy(_before(decode), *OPTIONS, "--cell", "c-d", "--cell-role", "decode") as answers,
    ):
        cell = PrefillCell("c-p", 3, "n-1", "127.0.0.1", reads.port, prefill.kv_port, LAYOUT, 16)
        await answers.admin("/pairs", msgspec.json.encode(Pairs("d", (cell,), prefill_from_tokens=FROM_TOKENS)))
        together = await asyncio.gather(*(_ask(answers, prompt=prompt) for prompt in ASKED))
        same = sum(_text(answer) == alone[prompt] for answer, prompt in zip(together, ASKED, strict=True))
        print("| what | figure |\n| --- | --- |")
        print(f"| prompts with the text of one engine | {same} of {len(ASKED)} |")
        for answer in together:
            _show_if_none(answer)
        print(f"| handovers | {await _handovers(answers)} |")
        for name in ("external_prefix_cache_hits_total", "nixl_num_failed_transfers_total"):
            print(f"| decode engine, `{name}` | {decode.metric(f'vllm:{name}'):.0f} |")
        late = {"prompt": f"Again: {LONG}", "max_tokens": TOKENS, "ignore_eos": True}
        expected = await asyncio.to_thread(prefill.complete, **late, cache_salt="alone")
        params = await asyncio.to_thread(_read_by, prefill, f"Again: {LONG}")
        for part in prefill.parts(0):
            part.kill()
        began = monotonic()
        again = await asyncio.to_thread(decode.complete, **late, kv_transfer_params=params)
        is_same = again["text"] == expected["text"]
        text = "same" if is_same else "another"
        print(f"| killed after its answer: text, seconds | {text}, {monotonic() - began:.1f} |")
        began = monotonic()
        after = await _ask(answers, prompt=f"And once more: {LONG}")
        print(f"| killed before: status, seconds | {after.status}, {monotonic() - began:.1f} |")
        _show_if_none(after)
        print(f"| handovers | {await _handovers(answers)} |\n| load average | {os.getloadavg()[0]:.1f} |")
        return same == len(ASKED) and is_same and _text(after) is not None


def _show_if_none(answer: Message) -> None:
    """All that was said where it is no text."""
    if _text(answer) is None:
        said = f"{answer.first_line}, {answer.headers}, {'whole' if answer.whole else 'cut'}: {answer.body.decode()}"
        print(f"| an answer without text | {said} |")


def _text(answer: Message) -> str | None:
    said = answer.json() if answer.status == 200 and answer.whole else {}
    return said["choices"][0]["text"] if "choices" in said else None


def _before(cell: RunningCell) -> Engine:
    """Where a proxy finds the engine of a cell."""
    engine = Engine()
    engine.port = int(cell.url.rpartition(":")[2])
    return engine


async def _ask(proxy: ProxyProcess, **body: Any) -> Message:
    asked = {"model": "smollm2", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **body}
    return await proxy.ask(request(PATH, json.dumps(asked).encode(), content_type="application/json"))


async def _handovers(proxy: ProxyProcess) -> str:
    load = msgspec.convert((await proxy.status())["load"]["handovers"], HandoverLoad)
    return f"{load.handovers_total}; alone {load.alone}; fallbacks {load.fallbacks}"


def _read_by(cell: RunningCell, prompt: str) -> dict[str, Any]:
    """Where a prompt lies that this engine has read."""
    members = msgspec.json.decode(b"{" + prefill_members(PATH.encode()) + b"}")
    body = {"model": "smollm2", "prompt": prompt, **members}
    answer = CLIENT.post(f"{cell.url}{PATH}", json=body, timeout=ANSWER_LIMIT_S).json()
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
