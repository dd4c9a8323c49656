"""Injects random faults into a running fleet and reports which promises break.

    make up ENGINE=sim SWITCHYARD_INGRESSES=2 DETACH=1
    make chaos MINUTES=30 SEED=1
    python -m bench chaos --seed 1 --seeds 5 --minutes 30
    python -m bench chaos --only "haproxy" --every 10 --hostile-share 1.0

Needs a fleet of `sim-70b` with two ingresses per region (same SWITCHYARD_HOME), without other users. Exit status 1 if a
promise was broken. The same seed injects the same faults in the same order; their effects differ."""

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from bench import percentile
from bench.chaos.campaign import AWAY, Campaign, FleetUnderTest, Report
from bench.chaos.hostile_clients import FULL_LOAD
from bench.chaos.schedule import EXEMPTIONS, PAUSES_S, Fault, kinds, schedule
from bench.chaos.users import Request, Users
from bench.fleet.live_fleet import AGENT_SERVER, HOME, SERVER, Fleet, Row, last_pass_age_s, launched, wait_for

REFUSED = re.compile(r'^switchyard_requests_refused\{(?=[^}]*deployment="([^"]*)")[^}]*\} (\S+)$', re.MULTILINE)
DEPLOYMENT = "sim-70b"
ROLLOUT_POLICY = {"min_healthy_s": 2, "canary_bake_s": 0, "bake_s": 0}
"""Every cell changes, without bakes: the few requests of a campaign do not suffice for the verdict of one."""
WHOLE_WITHIN_S = 120.0
COUNTED_WITHIN_S = 120.0
"""Ingresses report keys and tenants in turns of 15 s, and usage is added up every 10 s."""
ANSWER_WITHIN_S = 15.0
"""Of web, on a busy machine."""


def main(parser: argparse.ArgumentParser) -> None:
    options = _options(parser)
    chosen = kinds(options.longest_pause, options.only, options.without)
    if options.list:
        print("\n".join(sorted(map(str, chosen))))
        for each in EXEMPTIONS:
            print(f"\nmay break the connection of {each.where}, because {each.why}:")
            print("\n".join(sorted(f"  {target}: {harm}" for target, harm in each.kinds)))
        return
    if not chosen:
        sys.exit(f"no kind of fault has {options.only!r} in its name; --list prints them")
    first = options.seed
    broken = [seed for seed in range(first, first + options.seeds) if not _passes(options, seed, chosen)]
    sys.exit(f"seeds with broken promises: {', '.join(map(str, broken))}" if broken else 0)


def _passes(options: argparse.Namespace, seed: int, chosen: Sequence[Fault]) -> bool:
    fleet = Fleet(ANSWER_WITHIN_S)
    wait_for(lambda: fleet.is_whole(DEPLOYMENT), WHOLE_WITHIN_S, "the fleet is whole before the first fault")
    ingresses = _ingresses(fleet)
    if min(map(len, ingresses.values())) < 2:
        sys.exit("chaos needs two ingresses in each region: make up ENGINE=sim SWITCHYARD_INGRESSES=2")
    users = Users(ingresses, DEPLOYMENT, options.rate, seed)
    users.record()
    before: dict[str, int] = wait_for(
        lambda: refused_counts(fleet, DEPLOYMENT), WHOLE_WITHIN_S, "the control plane states its counts"
    )
    under_test = _under_test(fleet)
    campaign = Campaign(under_test, seed, _print_line, every_s=options.every, hostile_share=options.hostile_share)
    print(f"seed {seed}: {options.minutes:g} minutes, {options.rate:g} requests/s", flush=True)
    with users.sending() as requests:
        report = campaign.run(schedule(seed, chosen), requests, options.minutes * 60)
    report.broken += _miscounted(fleet, requests, before)
    _print(report)
    return not report.broken


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    full = ", ".join(f"{count} {harm}" for harm, count in FULL_LOAD.items())
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are injected, of each seed")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many campaigns, one after the other")
    parser.add_argument("--every", type=float, default=5.0, help="least seconds between two faults")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second of all users together")
    parser.add_argument("--longest-pause", type=float, default=max(PAUSES_S), help="seconds")
    parser.add_argument("--only", default="", metavar="WORDS", help="only kinds whose name contains these words")
    parser.add_argument("--without", default="", metavar="WORDS", help="no kind whose name contains these words")
    parser.add_argument("--hostile-share", type=float, default=0.1, help=f"share of the full hostile load ({full})")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults and exit")
    return parser.parse_args()


def _ingresses(fleet: Fleet) -> dict[str, list[str]]:
    """Region -> URLs of its ingresses."""
    found: dict[str, list[str]] = {}
    for row in fleet.rows("ingresses"):
        found.setdefault(row["region"], []).append(f"http://{row['address']}:{row['port']}")
    return found


def _miscounted(fleet: Fleet, requests: Sequence[Request], before: Mapping[str, int]) -> list[str]:
    """Refusals that clients and control plane counted differently."""
    deadline, found, after = time.monotonic() + COUNTED_WITHIN_S, ["the control plane did not state its counts"], before
    while time.monotonic() < deadline:
        with contextlib.suppress(*AWAY):
            after = refused_counts(fleet, DEPLOYMENT)
            found = differences(requests, before, after)
        if not found:
            break
        time.sleep(1)
    grown = ", ".join(f"{place} {count - before[place]}" for place, count in after.items())
    print(f"\nClients were refused {refusals(requests)} times; counted: {grown}")
    return found


def _print_line(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)


def _under_test(fleet: Fleet) -> FleetUnderTest:
    begin = fleet.last_event()

    def trail() -> Iterable[Row]:
        yield from fleet.events(begin)
        yield from fleet.rows("incidents")

    def roll_out() -> None:
        row = fleet.get(f"deployments/{DEPLOYMENT}")["model_version"]
        other = next(
            version["id"] for version in fleet.rows("model-versions", model=DEPLOYMENT, state="released")
            if version["id"] != row
        )  # fmt: skip
        fleet.post("rollouts", deployment=DEPLOYMENT, version=other, policy=ROLLOUT_POLICY, why="chaos")

    def is_whole() -> bool:
        # A fault during a rollout may look like the version's: it pauses, and continues as an operator would let it.
        for row in fleet.rows("rollouts", deployment=DEPLOYMENT, state="paused"):
            with contextlib.suppress(SystemExit):  # it may have ended in the meantime
                fleet.post(f"rollouts/{row['id']}/resume", why="chaos")
        return fleet.is_whole(DEPLOYMENT)

    return FleetUnderTest(
        home=HOME,
        web_url=SERVER,
        agents_url=AGENT_SERVER,
        cells=lambda: fleet.cells(DEPLOYMENT),
        nodes=lambda: {node["id"]: node for node in fleet.rows("nodes")},
        ingresses=lambda: {row["id"]: row for row in fleet.rows("ingresses")},
        is_whole=is_whole,
        open_incidents=lambda: [row["summary"] for row in fleet.rows("incidents", state="open")],
        sessions=lambda: (status := launched())["sessions"] | {"launcher": status["pid"]},
        last_pass_age_s=lambda: last_pass_age_s(timeout_s=ANSWER_WITHIN_S),
        trail=trail,
        order=lambda path: fleet.post(path, why="chaos"),
        roll_out=roll_out,
    )


def _print(report: Report) -> None:
    pauses = [pause_s for pause_s in report.longest_pauses_s if pause_s]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    moved = ", ".join(f"{name} {count}" for name, count in sorted(report.relays.items()) if count)
    print(f"\n{len(report.faults)} faults. {report.requests} requests in {report.attempts} attempts: {outcomes}")
    print(f"  {report.exempt} broken connections are exempt; {report.tokens} tokens, each as in the undisturbed run")
    print(f"  relays: {moved or 'no stream moved'}")
    if pauses:
        worst = percentile(pauses, 0.999)
        print(f"  longest pause within a stream, of all streams: p99.9 {worst:.2f} s, longest {pauses[0]:.2f} s")
    print(f"  longest gap between two passes {report.longest_pass_gap_s:.1f} s")
    print("Every promise held." if not report.broken else f"{len(report.broken)} promises were broken:")
    for line in report.broken:
        print(f"  {line}")


# --- refusals, as clients and the control plane counted them ---


def refused_counts(fleet: Fleet, deployment: str) -> dict[str, int]:
    metrics = REFUSED.findall(fleet.metrics())
    return {
        "usage": fleet.get("usage", deployment=deployment)["totals"]["refused"],
        "Prometheus": round(sum(float(value) for name, value in metrics if name == deployment)),
    }


def refusals(requests: Iterable[Request]) -> int:
    return sum(attempt.was_refused for request in requests for attempt in request.attempts)


def differences(requests: Sequence[Request], before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    seen = refusals(requests)
    return [
        f"clients were refused {seen} times, {place} counted {count - before[place]}"
        for place, count in after.items()
        if count - before[place] != seen
    ]
