"""Attacks a running fleet in every region, with good requests beside, and reports whether anything but the attackers
noticed.

    python -m bench.fuzz --seconds 600

Needs a fleet from `make up` (same SWITCHYARD_HOME) with `sim-70b`; attacks `smollm2` too where it serves. Prints the
seed, with which a run draws the same attacks again. Exit status 1 if a good request failed, a cell changed its state or
an answer was not one that a client of its path can read.
"""

import argparse
import asyncio
import itertools
import math
import random
import sys
import time
from collections import Counter
from datetime import datetime
from urllib.parse import urlsplit

from bench.fuzz.attacks import MUTATED, Attack, everything, generated
from bench.fuzz.judge import Served, changes, complaint, servers_of
from bench.fuzz.sending import answer_to
from bench.live_fleet import HOME, Fleet, load, wait_for
from engine_agent.ingress.command_socket import CommandSocket
from engine_agent.ingress.sections import ADMIN_SOCKET

GOOD, ALSO = "sim-70b", "smollm2"
SHOWN = 60
SETTLED_S = 90.0
"""After the first plan of a deployment: a minute later its shares leave the regions where it never had a cell."""
NO_HARM = ("rollout.", "usage.", "user.", "audit.")
"""Events of these kinds do not speak of a cell's health."""


def servers() -> dict[tuple[str, str], Served]:
    """Every server of every ingress, with the ingress's name before that of the backend."""

    async def one(folder: str) -> str:
        return await CommandSocket(HOME / "ingresses" / folder, ADMIN_SOCKET).send("show stat -1 4 -1")

    found = {}
    for folder in sorted(path.name for path in (HOME / "ingresses").iterdir()):
        for (backend, server), served in servers_of(asyncio.run(one(folder))).items():
            found[(f"{folder} {backend}", server)] = served
    return found


def seconds_since_shift(fleet: Fleet) -> float:
    """How long the shares of all deployments have stood."""
    newest = fleet.get("events", kind="traffic.shift", page_size=1)["results"]
    return math.inf if not newest else time.time() - datetime.fromisoformat(newest[0]["at"]).timestamp()


class Attackers:
    """Send attacks to each ingress in turn until the time is over, `at_once` at a time."""

    def __init__(self, urls: list[str], models: list[str], seed: int, seconds: float) -> None:
        fixed = [attack for model in models for attack in everything(model)]
        rng = random.Random(seed)
        rng.shuffle(fixed)
        drawn = [generated(random.Random(seed + number), model) for number, model in enumerate(models)]
        endless = itertools.chain.from_iterable(zip(*drawn, strict=True))
        mutated = (attack for attack in endless if attack.name.startswith(MUTATED))
        first = next(mutated)  # makes the list that the others are made of, which is not part of the time
        # In turn, because a run of minutes ends before the fixed ones do.
        in_turn = itertools.chain.from_iterable(zip(fixed, mutated, strict=False))
        self._attacks = itertools.chain([first], in_turn, mutated)
        self._ports = itertools.cycle(urlsplit(url).port or 80 for url in urls)
        self._until = time.monotonic() + seconds
        self.fixed, self.mutated_sent = len(fixed), 0
        self.statuses: Counter[str] = Counter()
        self.complaints: list[str] = []

    async def run(self, at_once: int) -> None:
        await asyncio.gather(*(self._send_some() for _ in range(at_once)))

    async def _send_some(self) -> None:
        while time.monotonic() < self._until:
            attack = next(self._attacks)
            self.mutated_sent += attack.name.startswith(MUTATED)
            said = await self._send(attack, next(self._ports))
            if said:
                self.complaints.append(f"{attack.name[:160]}: {said}")

    async def _send(self, attack: Attack, port: int) -> str | None:
        try:
            answer = await answer_to(attack, "127.0.0.1", port)
        except TimeoutError:
            self.statuses["none"] += 1
            return "no answer, and the connection stayed open"
        except OSError as error:
            self.statuses["refused"] += 1
            return f"no connection: {error}"
        is_http = answer.startswith(b"HTTP/1.")
        self.statuses[answer[9:12].decode("latin-1") if is_http else "none"] += 1
        return complaint(attack, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=10.0, help="good streams a second to each ingress")
    parser.add_argument("--at-once", type=int, default=4, help="attacks at the same time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    fleet = Fleet()
    wait_for(lambda: fleet.is_whole(GOOD), 120, f"{GOOD} is whole before the first attack")
    wait_for(lambda: seconds_since_shift(fleet) > SETTLED_S, 600, "no traffic was shifted for a while")
    models = [GOOD, *(row["name"] for row in fleet.rows("deployments") if row["name"] == ALSO)]
    urls = fleet.ingresses(GOOD)
    attackers = Attackers(urls, models, options.seed, options.seconds)
    print(f"seed {options.seed}: {', '.join(models)} through {', '.join(urls)}", flush=True)
    before, last_event = servers(), fleet.last_event()
    with load(urls, GOOD, options.rate, max_tokens=24) as answers:
        asyncio.run(attackers.run(options.at_once))
    failed = [answer for answer in answers if answer.error]
    moved = changes(before, servers())
    events = [row for row in fleet.events(last_event) if not row["kind"].startswith(NO_HARM)]
    sent = attackers.statuses.total()
    mutated = attackers.mutated_sent
    print(
        f"{sent} attacks, {sent - mutated} of the fixed {attackers.fixed} and {mutated} mutated: "
        f"{dict(attackers.statuses)}"
    )
    print(f"{len(answers)} good requests, {len(failed)} failed")
    for title, lines in (
        ("good requests that failed", [f"{answer.url} {answer.cell} {answer.error}" for answer in failed]),
        ("servers that changed", moved),
        ("events", [f"{row['at']} {row['kind']} {row['message']} {row['detail']}" for row in events]),
        ("answers that a client cannot use", attackers.complaints),
    ):
        print(f"{title}: {len(lines)}")
        print("".join(f"  {line}\n" for line in lines[:SHOWN]), end="")
    sys.exit(1 if failed or moved or events or attackers.complaints else 0)


if __name__ == "__main__":
    main()
