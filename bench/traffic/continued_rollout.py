"""A rollout of all cells of a running fleet under long streams, with and without continuation."""

import asyncio
import contextlib
import statistics
from collections.abc import Iterator
from threading import Event, Thread
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from bench import note
from bench.fleet.live_fleet import ACTIVE, Fleet, spans, wait_for
from bench.traffic.stream_reader import Seen, StreamReader

DEPLOYMENT, CELLS, PLACES = "sim-70b", 4, 256
STEP_MS = 1000
"""Between two tokens: a stream of 20 takes 20 s."""
POLICY = {"min_healthy_s": 5, "canary_bake_s": 0, "bake_s": 0}
FIRST, ALIKE, OTHER = "slow-1", "slow-2", "slow-other"
VERSIONS: dict[str, dict[str, Any]] = {FIRST: {}, ALIKE: {}, OTHER: {"context_length": 4000}}
"""`OTHER` has another context, so that its answers could be others, and it continues no stream of the first two."""
CASES = (("without", ALIKE), ("answers alike", FIRST), ("other answers", OTHER))
"""What is measured, one after the other, and the version that it rolls out to."""
LIMIT_S = 900.0


def rollouts(rate: float, tokens: int, rounds: int) -> None:
    """Rolls out without continuation, with it to a version that answers alike, and to one that does not. The deployment
    gets its region, version and policy back."""
    fleet = Fleet()
    before = fleet.wanted(DEPLOYMENT)
    region, *others = sorted(before)
    first = fleet.get(f"deployments/{DEPLOYMENT}")["model_version"]
    for version, fields in VERSIONS.items():
        _register(fleet, version, fields)
    try:
        for other in others:
            fleet.scale(DEPLOYMENT, other, 0)
        fleet.scale(DEPLOYMENT, region, CELLS)
        _whole(fleet)
        for number in range(1, rounds + 1):
            _roll_out(fleet, f"{DEPLOYMENT}@{FIRST}")
            for case, version in CASES:
                _set_continuation(fleet, case != "without")
                row = _measure(fleet, region, version, rate, tokens)
                note("continued_rollout", {"case": case, "round": number, **row})
    finally:
        _set_continuation(fleet, True)
        _roll_out(fleet, first)
        for place, cells in before.items():
            fleet.scale(DEPLOYMENT, place, cells)


def _register(fleet: Fleet, version: str, fields: dict[str, Any]) -> None:
    name = f"{DEPLOYMENT}@{version}"
    if any(row["id"] == name for row in fleet.rows("model-versions", model=DEPLOYMENT)):
        return
    options = fleet.get(f"model-versions/{DEPLOYMENT}@1")["engine_options"]
    slow = {**options, "decode_step_ms": STEP_MS, "decode_step_per_seq_ms": 0}
    changed = {"engine_options": slow, "max_concurrency": PLACES, **fields}
    fleet.post("model-versions", model=DEPLOYMENT, version=version, based_on=f"{DEPLOYMENT}@1", **changed)
    fleet.post(f"model-versions/{name}/validate")
    wait_for(lambda: fleet.get(f"model-versions/{name}")["state"] == "validated", LIMIT_S, f"{name} is validated")


def _set_continuation(fleet: Fleet, continues: bool) -> None:
    fleet.ask("PATCH", f"traffic/policies/{DEPLOYMENT}", {"continuation": continues})


def _whole(fleet: Fleet) -> None:
    wait_for(lambda: fleet.is_whole(DEPLOYMENT), LIMIT_S, f"every cell of {DEPLOYMENT} is ready")


def _roll_out(fleet: Fleet, version: str) -> str:
    """Returns how the rollout ended."""
    request = {"deployment": DEPLOYMENT, "version": version, "policy": POLICY, "allow_unreleased": True}
    if fleet.get(f"deployments/{DEPLOYMENT}")["model_version"] == version:
        return "succeeded"
    name = fleet.post("rollouts", why="bench", **request)["id"]
    wait_for(lambda: fleet.get(f"rollouts/{name}")["state"] not in ACTIVE, LIMIT_S, f"rollout {name} ends")
    _whole(fleet)
    return str(fleet.get(f"rollouts/{name}")["state"])


def _measure(fleet: Fleet, region: str, version: str, rate: float, tokens: int) -> dict[str, Any]:
    url = next(row["ingress_url"] for row in fleet.rows("regions") if row["name"] == region)
    port, mark = int(urlsplit(url).port or 80), fleet.last_event()
    reader = StreamReader("chat", tokens, model=DEPLOYMENT)
    expected = asyncio.run(reader.read(port, 0))()
    with streaming(reader, port, rate) as seen:
        wait_for(lambda: len(seen) >= 3 * rate, LIMIT_S, "streams begin to end")
        began = monotonic()
        state = _roll_out(fleet, f"{DEPLOYMENT}@{version}")
        took_s = monotonic() - began
    events = fleet.events(mark, deployment=DEPLOYMENT)
    begun = [each for each in seen if not each.error.startswith("status ")]
    drains = spans(events, "cell.draining", "cell.starting")
    return {
        "rollout": state,
        "took_s": round(took_s, 1),
        "drains_s": [round(each, 1) for each in drains],
        "drain_p50_s": round(statistics.median(drains), 1) if drains else None,
        "streams": len(seen),
        "cut": sum(each.is_cut for each in begun),
        "refused": len(seen) - len(begun),
        "errors": sorted({each.error for each in seen if each.error}),
        "texts_that_differ": sum(each.text != expected.text for each in begun),
        "usages_that_differ": sum(each.usage != expected.usage for each in begun),
        "longest_pause_s": round(max(each.longest_pause_s for each in seen), 2),
    }


@contextlib.contextmanager
def streaming(reader: StreamReader, port: int, rate: float) -> Iterator[list[Seen]]:
    """So many streams a second from a thread while the block runs; then the last ones end."""
    seen: list[Seen] = []
    stop = Event()

    async def one() -> None:
        seen.append((await reader.read(port, 0))())

    async def send() -> None:
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                group.create_task(one())
                await asyncio.sleep(1 / rate)

    thread = Thread(target=asyncio.run, args=(send(),), name="streams")
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
