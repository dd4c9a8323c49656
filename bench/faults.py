"""Breaks single nodes of a running fleet under load, and says who was blamed, what was done, how long it took, and what
clients saw.

    .venv/bin/python bench/faults.py                # every case, about eight minutes
    .venv/bin/python bench/faults.py hard operator

Needs a fleet of `sim-70b` from `make up` (same SWITCHYARD_HOME) that nobody else uses. `slow` scales it to three cells
in each region for its time: a rank needs five peers in its role to be compared with.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
import psutil
from live_fleet import HOME, Fleet, Row, at, fewest_ready, load, wait_for

from engine_agent.protocol.ports import ENGINE_ADMIN

DEPLOYMENT = "sim-70b"
LIMIT_S = 300.0
HARD = "nrt_execute failed: status 1202 NRT_EXEC_HW_ERR_NC_UE"
"""What the Neuron runtime writes of an uncorrectable error in a core's SRAM: no restart heals that."""
SOFT = "nrt_execute failed: status 1205 NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE"
"""What a reload heals."""
SLOW_FACTOR = 2.0
SHADOW_WATCHED_S = 30.0


@dataclass
class Scene:
    """A fleet, and the moment in which something was done to it."""

    fleet: Fleet
    began: float = 0.0

    def begin(self) -> None:
        self.began = time.time()

    def say(self, what: str, moment: float | None = None) -> None:
        print(f"  {(moment or time.time()) - self.began:7.1f} s  {what}", flush=True)

    def cell(self) -> Row:
        """A serving cell with a follower."""
        return next(cell for cell in self.fleet.cells(DEPLOYMENT).values() if len(cell["nodes"]) > 1)

    def node(self, node: str) -> Row:
        row: Row = self.fleet.get(f"nodes/{node}")
        return row

    def incident(self, node: str, kind: str, **query: str) -> Row:
        """The incident about this node since the scene began, waited for."""
        since = datetime.fromtimestamp(self.began, UTC).isoformat()

        def opened() -> list[Row]:
            return self.fleet.rows("incidents", node=node, kind=kind, since=since, **query)

        row: Row = wait_for(opened, LIMIT_S, f"an incident {kind} about {node}")[0]
        self.say(f"{kind}: {row['summary']}", datetime.fromisoformat(row["opened_at"]).timestamp())
        return row

    def healed(self, cell: Row, without: str) -> None:
        """Wait until the cell serves again without that node, and the machine is given back."""

        def is_ready() -> bool:
            now = self.fleet.get(f"cells/{cell['id']}")
            return now["state"] == "ready" and without not in {node["id"] for node in now["nodes"]}

        wait_for(is_ready, LIMIT_S, f"{cell['id']} serves without {without}")
        kept = {node["id"] for node in cell["nodes"]} & {
            node["id"] for node in self.fleet.get(f"cells/{cell['id']}")["nodes"]
        }
        self.say(f"{cell['id']} serves without {without}, with its {', '.join(sorted(kept))}")
        wait_for(lambda: self.node(without)["state"] == "retired", LIMIT_S, f"{without} is retired")
        self.say(f"{without} is retired")

    def end_engine(self, node: str, last_words: str) -> None:
        """Have its engine die as the Neuron runtime lets it die: a line in the log, and the process is gone."""
        with (HOME / "nodes" / node / "engine.log").open("a") as log:
            log.write(last_words + "\n")
        psutil.Process(self.node(node)["engine"]["pid"]).kill()

    def admin(self, node: str) -> str:
        """Where faults are put into a simulated engine."""
        row = self.node(node)
        return f"http://{row['address']}:{row['port_base'] + ENGINE_ADMIN}/fault"

    def whole(self) -> None:
        wait_for(lambda: self.fleet.is_whole(DEPLOYMENT), LIMIT_S, f"every cell of {DEPLOYMENT} is ready")


def hard(scene: Scene) -> None:
    """A follower's accelerator has an error that no restart heals."""
    cell = scene.cell()
    victim = cell["nodes"][1]["id"]
    scene.begin()
    scene.end_engine(victim, HARD)
    scene.incident(victim, "hardware-fault")
    scene.healed(cell, victim)


def slow(scene: Scene) -> None:
    """A follower computes at half the speed: first with the rule in shadow, then in force."""
    fleet = scene.fleet
    before = fleet.wanted(DEPLOYMENT)
    for region in before:
        fleet.scale(DEPLOYMENT, region, 3)
    scene.whole()
    fleet.ask("PATCH", "fault-rules/slow", {"mode": "shadow", "why": "bench"})
    cell = scene.cell()
    victim, mate = cell["nodes"][1]["id"], cell["nodes"][0]["id"]
    scene.begin()
    httpx.post(scene.admin(victim), json={"kind": "slow", "factor": SLOW_FACTOR}).raise_for_status()
    scene.incident(victim, "node-slow", state="open")
    time.sleep(SHADOW_WATCHED_S)
    now = fleet.get(f"cells/{cell['id']}")
    untouched = now["generation"] == cell["generation"] and not scene.node(victim)["cordoned"]
    scene.say(f"after {SHADOW_WATCHED_S:.0f} s in shadow: {'nothing was done' if untouched else 'TOUCHED'}")
    fleet.ask("PATCH", "fault-rules/slow", {"mode": "on", "why": "bench"})
    scene.say("the rule is put in force")
    scene.healed(cell, victim)
    incidents = fleet.rows("incidents", kind="node-slow")
    others = {row["node"] for row in incidents} - {victim}
    scene.say(f"accused: {victim}; its mate {mate} and all others: {', '.join(sorted(others)) or 'not accused'}")
    for region, cells in before.items():
        fleet.scale(DEPLOYMENT, region, cells)


def operator(scene: Scene) -> None:
    """A person cordons, drains, replaces and dismisses."""
    fleet = scene.fleet
    spare = next(row["id"] for row in fleet.rows("nodes", role="spare", state="ready"))
    scene.begin()
    fleet.post(f"nodes/{spare}/cordon", why="bench")
    scene.say(f"cordoned the spare {spare}: {scene.node(spare)['state']}, in no cell")
    fleet.post(f"nodes/{spare}/uncordon", why="bench")
    cell = scene.cell()
    emptied = cell["nodes"][1]["id"]
    fleet.post(f"nodes/{emptied}/drain", why="bench")
    wait_for(lambda: fleet.get(f"cells/{cell['id']}")["state"] == "stopped", LIMIT_S, f"{cell['id']} stops")
    scene.say(f"drained {emptied}: {cell['id']} stopped, the machine is {scene.node(emptied)['state']}")
    scene.whole()
    scene.say("another cell serves in its stead")
    fleet.post(f"nodes/{emptied}/uncordon", why="bench")
    cell = scene.cell()
    victim = cell["nodes"][0]["id"]
    scene.begin()
    fleet.post(f"nodes/{victim}/replace", why="bench")
    scene.say(f"requested a replacement of {victim}, the leader of {cell['id']}")
    scene.healed(cell, victim)
    cell = scene.cell()
    warned = cell["nodes"][1]["id"]
    scene.begin()
    scene.end_engine(warned, SOFT)
    incident = scene.incident(warned, "hardware-warning")
    fleet.post(f"incidents/{incident['id']}/dismiss", why="bench")
    row = fleet.get(f"incidents/{incident['id']}")
    scene.say(f"dismissed: {row['state']} by {row['closed_by']}: {row['resolution']}")


CASES: dict[str, Callable[[Scene], None]] = {case.__name__: case for case in (hard, slow, operator)}


def run(scene: Scene, name: str, rate: float) -> None:
    """One case under load, its timeline from what was done last, and what clients saw of it."""
    fleet = scene.fleet
    scene.whole()
    print(f"\n{name}: {CASES[name].__doc__}", flush=True)
    mark, before = fleet.last_event(), fleet.cells(DEPLOYMENT)
    with load(fleet.ingresses(DEPLOYMENT), DEPLOYMENT, rate, 24) as answers:
        CASES[name](scene)
        scene.whole()
    events = fleet.events(mark)
    for event in events:
        if event["kind"].startswith(("node.", "incident.", "replacement.")) or event["deployment"] == DEPLOYMENT:
            print(f"    {at(event) - scene.began:7.1f} {event['message']}")
    failed = [answer for answer in answers if answer.error]
    for one in failed:
        print(f"  failed, from {one.cell or 'nobody'}: {one.error}")
    least = fewest_ready([event for event in events if event["deployment"] == DEPLOYMENT], set(before))
    print(f"  requests {len(answers)}, failed {len(failed)}; at least {least} of {len(before)} cells ready", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all if none is named")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second to each region")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    for name in options.cases or CASES:
        run(Scene(Fleet()), name, options.rate)


if __name__ == "__main__":
    main()
