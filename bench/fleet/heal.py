"""Time until a killed node is unrouted and replaced, and what clients saw.

    .venv/bin/python -m bench heal --model sim-70b --region us-east-1 --rounds 4

Needs a fleet from `make up` (same SWITCHYARD_HOME). Each round kills -9 the agent and the engine of one node, leader
and follower in turn, while a client sends requests at a steady rate through the region's ingress."""

import argparse
import statistics
import time
from dataclasses import dataclass

from bench.fleet.live_fleet import HOME, Fleet, load, wait_for
from lab.steady_load import agent_and_engine

POLL_S = 0.02
HEAL_LIMIT_S = 300.0


@dataclass(frozen=True)
class Round:
    role: str
    unrouted_s: float
    ready_s: float
    sent: int
    failed_streaming: int
    failed_otherwise: int


def is_routed(fleet: Fleet, cell_id: str, region: str) -> bool:
    newest = max(fleet.rows("routing-tables", region=region), key=lambda table: int(table["revision"]))
    pools = fleet.get(f"routing-tables/{newest['id']}")["body"]["pools"]
    return any(cell["cell"] == cell_id for pool in pools for cell in pool["cells"])


def one_round(fleet: Fleet, url: str, options: argparse.Namespace, rank: int) -> Round:
    cell = fleet.rows("cells", deployment=options.model, region=options.region, state="ready")[0]
    node = next((node for node in cell["nodes"] if node["rank"] == rank), cell["nodes"][0])

    def ready_again() -> bool:
        now = fleet.get(f"cells/{cell['id']}")
        return bool(now["state"] == "ready" and now["generation"] > cell["generation"])

    with load([url], options.model, options.rate, max_tokens=24) as answers:
        victims = agent_and_engine(node["id"], home=HOME)
        killed_at = time.monotonic()
        for victim in victims:
            victim.kill()
        wait_for(lambda: not is_routed(fleet, cell["id"], options.region), 60.0, f"{cell['id']} is unrouted", POLL_S)
        unrouted_s = time.monotonic() - killed_at
        wait_for(ready_again, HEAL_LIMIT_S, f"{cell['id']} is ready again", POLL_S)
        ready_s = time.monotonic() - killed_at
    failed = [answer for answer in answers if answer.error]
    streaming = [answer for answer in failed if answer.was_streaming_from(cell["id"], killed_at)]
    for answer in failed:
        print(f"  failed at {answer.began - killed_at:+.2f} s from {answer.cell or 'no cell'}: {answer.error}")
    return Round(node["role"], unrouted_s, ready_s, len(answers), len(streaming), len(failed) - len(streaming))


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="sim-70b")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    options = parser.parse_args()
    fleet = Fleet()
    url = str(fleet.get(f"regions/{options.region}")["ingress_url"])
    rounds = []
    for number in range(options.rounds):
        done = one_round(fleet, url, options, rank=number % 2)
        print(
            f"round {number + 1}, {done.role}: unrouted in {done.unrouted_s:.2f} s, ready in {done.ready_s:.1f} s;"
            f" {done.sent} requests, {done.failed_streaming} cut while streaming, {done.failed_otherwise} failed"
            " otherwise"
        )
        rounds.append(done)
    print(
        f"median of {len(rounds)}: unrouted {statistics.median(r.unrouted_s for r in rounds):.2f} s, "
        f"ready {statistics.median(r.ready_s for r in rounds):.1f} s; "
        f"failed other than by streaming from the killed cell: {sum(r.failed_otherwise for r in rounds)} "
        f"of {sum(r.sent for r in rounds)}"
    )
