"""How many requests a second a region's own applications send, from what ingresses count. Pure.

An ingress counts what it gives its own cells, wherever that came from, and what it sends to other regions. So what
arrives from applications is both, less what other regions' ingresses sent here.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from engine_agent.protocol.messages import JsonObject


class Counted(Struct, frozen=True):
    """The last word of an ingress on one pool: counters since its worker started, and the rates since the word before.

    `at` in seconds since 1970, rates per second over the last `over_s`, 0 at first; `spilled` maps another region to
    what was sent there.
    """

    at: float
    worker: int
    local: int
    spilled: dict[str, int] = {}
    local_per_s: float = 0.0
    spilled_per_s: dict[str, float] = {}
    over_s: float = 0.0


def count(before: Counted | None, telemetry: JsonObject, pool: str, at: float) -> Counted | None:
    """What an ingress says of a pool now. Without a new word the old one stays; None: it never spoke of that pool."""
    said = telemetry.get("pools", {}).get(pool)
    if said is None or (before is not None and at <= before.at):
        return before
    now = Counted(at, telemetry.get("worker_pid", 0), said["requests_total"], said.get("spilled_to", {}))
    if before is None:
        return now
    return Counted(
        now.at,
        now.worker,
        now.local,
        now.spilled,
        _per_s(before, now, before.local, now.local),
        {region: _per_s(before, now, before.spilled.get(region, 0), total) for region, total in now.spilled.items()},
        now.at - before.at,
    )


def arrivals_per_s(counted: Mapping[str, Iterable[Counted]]) -> dict[str, float]:
    """Region -> requests a second of its own applications. Reports come at different moments: never below 0."""
    found = {
        region: sum(one.local_per_s + sum(one.spilled_per_s.values()) for one in ingresses)
        for region, ingresses in counted.items()
    }
    for ingresses in counted.values():
        for one in ingresses:
            for region, per_s in one.spilled_per_s.items():
                if region in found:
                    found[region] -= per_s
    return {region: max(0.0, per_s) for region, per_s in found.items()}


def in_service(telemetry: JsonObject, cells: Iterable[str]) -> float:
    """How many requests these cells work on, as an ingress sees it; those that wait for a cell are not among them."""
    there = telemetry.get("cells", {})
    return float(sum(there[cell].get("in_flight", 0) for cell in cells if cell in there))


def _per_s(before: Counted, now: Counted, was: int, total: int) -> float:
    """A worker that started since counts from 0. A server that was taken out takes its count along: then it is 0."""
    more = total if now.worker != before.worker else max(0, total - was)
    return more / (now.at - before.at)
