"""Failed requests and recovery time after a spot warning on a leader, under load.

    .venv/bin/python -m bench cloud_spot [--rate 20] [--cases lone-0 lone-2 …]

Needs a fleet in the laboratory's cloud (`make up CLOUD=aws DETACH=1`). A case sets the deployment's cells in each
region and the spares, sends a spot warning for the instance that leads the first region's cell, and streams through
that region's load balancer until the instance has stopped. Each row has the requests without an immediate answer, the
time when another cell was ready, and how long before the end that was. Exit status 1: a request failed in a case that
must have no failures."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from os import environ
from typing import Any

from lab.hosts import client, cloud_control
from lab.hosts.cloud_fleet import INSTANCE_TYPE, CloudFleet
from lab.hosts.fleet import DEPLOYMENT, read_ports
from lab.hosts.load import Stream, streaming
from lab.hosts.places import read_places
from lab.hosts.topology import NoLaboratory

LEAD_S = 120.0
BEFORE_S, AFTER_S = 10.0, 10.0
"""Streams that run before the warning, and after the end."""
WHOLE_WITHIN_S = 400.0
POLL_S = 0.5
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """`others`: cells in the second region. `spares`: idle machines in the first. `is_gapless`: no request may fail."""

    others: int
    spares: int
    is_gapless: bool


CASES: Mapping[str, Case] = {
    "lone-0": Case(others=0, spares=0, is_gapless=False),
    "lone-1": Case(others=0, spares=1, is_gapless=False),
    "lone-2": Case(others=0, spares=2, is_gapless=True),
    "two-0": Case(others=1, spares=0, is_gapless=True),
    "two-1": Case(others=1, spares=1, is_gapless=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case. Seconds since the warning; None: it did not happen in time."""

    streams: tuple[Stream, ...]
    drained_s: float | None
    ready_s: float | None
    states: tuple[str, ...]

    @property
    def failed(self) -> int:
        """Requests that had no whole answer at the first try, or whose answer broke off."""
        return sum(bool(one.error) or one.tries > 1 for one in self.streams)

    def row(self, name: str) -> str:
        case = CASES[name]
        whole = f"{self.failed} of {len(self.streams)}"
        ready = "not before the end" if self.ready_s is None else f"{self.ready_s:.1f}"
        left = "-" if self.ready_s is None else f"{LEAD_S - self.ready_s:.0f}"
        drained = "-" if self.drained_s is None else f"{self.drained_s:.1f}"
        return f"| {1 + case.others} | {case.spares} | {whole} | {drained} | {ready} | {left} |"


class SpotWarnings:
    def __init__(self, rate: float, say: Callable[[str], None]) -> None:
        self._rate, self._say = rate, say
        places, ports = read_places(environ), read_ports(environ)
        topology = client.topology_of(places)
        self._fleet = CloudFleet(places, topology, ports, say)
        self._first, *self._rest = topology.regions
        self._url = f"http://127.0.0.1:{ports.ingress}"

    def play(self, name: str) -> Outcome:
        case = CASES[name]
        self._prepare(case)
        [cell] = self._cells()
        leader = next(node["id"] for node in cell["nodes"] if node["rank"] == 0)
        instance = next(row["provider_id"] for row in self._fleet.rows("machines") if row["node"] == leader)
        self._say(f"{name}: whole; {instance} leads {cell['id']}")
        with streaming({self._first: {"balancer": self._url}}, DEPLOYMENT, self._rate) as streams:
            time.sleep(BEFORE_S)
            cloud_control.ask("spot-warning", instance=instance)
            drained_s, ready_s, states = self._watch(leader)
            time.sleep(AFTER_S)
        return Outcome(tuple(streams), drained_s, ready_s, states)

    def _watch(self, leader: str) -> tuple[float | None, float | None, tuple[str, ...]]:
        """Until the instance has ended: when its cell left, when another machine's was ready, and each state seen."""
        began, drained_s, ready_s = time.monotonic(), None, None
        states: list[str] = []
        while (now_s := time.monotonic() - began) < LEAD_S:
            cells = self._cells()
            on_it = [cell for cell in cells if leader in {node["id"] for node in cell["nodes"]}]
            elsewhere = [cell for cell in cells if cell not in on_it and cell["state"] == "ready"]
            if drained_s is None and not any(cell["state"] == "ready" for cell in on_it):
                drained_s = now_s
            if ready_s is None and elsewhere:
                ready_s = now_s
            seen = ", ".join(f"{cell['id']} {cell['state']}" for cell in cells)
            if not states or states[-1].partition(" ")[2] != seen:
                states.append(f"{now_s:.1f} {seen}")
            time.sleep(POLL_S)
        return drained_s, ready_s, tuple(states)

    def _prepare(self, case: Case) -> None:
        spares = {INSTANCE_TYPE: case.spares}
        self._fleet.ask("PATCH", f"regions/{self._first}/", {"spares": spares})
        cells = {self._first: 1, **dict.fromkeys(self._rest, case.others)}
        wanted = [{"region": region, "cells": number} for region, number in cells.items()]
        self._fleet.ask("PATCH", f"deployments/{DEPLOYMENT}/", {"regions": wanted})
        missing = partial(self._missing, case, cells, set[str]())
        self._fleet.until(missing, WHOLE_WITHIN_S, "the fleet is not as the case wants it")

    def _missing(self, case: Case, cells: Mapping[str, int], ended: set[str]) -> str:
        """Returns what is missing; terminates a surplus spare, as an operator might in AWS's console."""
        ready = [row for row in self._fleet.rows("cells") if row["state"] == "ready"]
        there = {region: sum(row["region"] == region for row in ready) for region in cells}
        leaving = [row["id"] for row in self._fleet.rows("cells") if row["state"] not in {"ready", "stopped"}]
        if there != dict(cells) or leaving:
            return f"cells ready are {there}, on their way {leaving}"
        nodes = [row for row in self._fleet.rows("nodes") if row["region"] == self._first and row["role"] == "spare"]
        idle = [row["id"] for row in nodes if row["state"] == "ready" and not row["cordoned"] and row["connected"]]
        if len(idle) > case.spares and not ended:
            surplus = set(idle[case.spares :])
            for row in self._fleet.rows("machines"):
                if row["node"] in surplus:
                    cloud_control.ask("terminate", instance=row["provider_id"])
            ended |= surplus
        others = [row["id"] for row in nodes if row["id"] not in idle and row["state"] not in {"lost", "retired"}]
        return f"idle spares are {idle}, others {others}" if len(idle) != case.spares or others else ""

    def _cells(self) -> list[Row]:
        return [row for row in self._fleet.rows("cells") if row["region"] == self._first and row["state"] != "stopped"]


def main(parser: argparse.ArgumentParser) -> int:
    parser.add_argument("--rate", type=float, default=20.0, help="streams a second")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    warnings = SpotWarnings(asked.rate, lambda line: print(line, file=sys.stderr, flush=True))
    outcomes: dict[str, Outcome] = {}
    try:
        for name in asked.cases:
            outcomes[name] = warnings.play(name)
            print(f"{name}: {outcomes[name].row(name)}", file=sys.stderr, flush=True)
    except NoLaboratory as error:
        print(error, file=sys.stderr)
        return 2
    for line in report(outcomes):
        print(line)
    return int(any(CASES[name].is_gapless and outcome.failed for name, outcome in outcomes.items()))


def report(outcomes: Mapping[str, Outcome]) -> Iterable[str]:
    yield "| cells | spares | failed | cell left, s | ready elsewhere, s | before the end, s |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: |"
    yield from (outcome.row(name) for name, outcome in outcomes.items())
    for name, outcome in outcomes.items():
        yield f"{name}: {'; '.join(outcome.states)}"
        errors = {one.error or f"answered at try {one.tries}" for one in outcome.streams if one.error or one.tries > 1}
        yield from (f"  {error}" for error in sorted(errors)[:10])
