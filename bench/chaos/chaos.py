"""Injects random faults into a running fleet and reports which promises break.

    make chaos SECONDS=1800 SEED=1
    python -m bench chaos --list
    python -m bench chaos --only "haproxy" --every 10 --hostile-share 1.0

Needs a fleet of `sim-70b` from `make up ENGINE=sim` (same SWITCHYARD_HOME) without other users. Exit status 1 if a
promise was broken. The same seed injects the same faults in the same order; their effects differ."""

import argparse
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from bench.chaos.campaign import Campaign, FleetUnderTest, Report
from bench.chaos.hostile_clients import FULL_LOAD
from bench.chaos.schedule import PAUSES_S, kinds, schedule
from bench.fleet.live_fleet import AGENT_SERVER, HOME, SERVER, Fleet, Row, last_pass_age_s, launched, load, wait_for
from lab.steady_load import Answer

REFUSED = re.compile(r'^switchyard_requests_refused\{(?=[^}]*deployment="([^"]*)")[^}]*\} (\S+)$', re.MULTILINE)
DEPLOYMENT = "sim-70b"
WHOLE_WITHIN_S = 120.0
COUNTED_WITHIN_S = 120.0
"""Ingresses report keys and tenants in turns of 15 s, and usage is added up every 10 s."""
ANSWER_WITHIN_S = 3.0
"""Of web. A paused process must not delay the next faults."""


def main(parser: argparse.ArgumentParser) -> None:
    options = _options(parser)
    chosen = kinds(options.longest_pause, options.only, options.without)
    if options.list:
        print("\n".join(sorted(map(str, chosen))))
        return
    if not chosen:
        sys.exit(f"no kind of fault has {options.only!r} in its name; --list prints them")
    fleet = Fleet(ANSWER_WITHIN_S)
    wait_for(lambda: fleet.is_whole(DEPLOYMENT), WHOLE_WITHIN_S, "the fleet is whole before the first fault")
    faults = schedule(options.seed, options.seconds, options.every, chosen)
    before = refused_counts(fleet, DEPLOYMENT)
    campaign = Campaign(_under_test(fleet), options.seed, _print_line, hostile_share=options.hostile_share)
    with load(fleet.ingresses(DEPLOYMENT), DEPLOYMENT, options.rate, max_tokens=24) as requests:
        report = campaign.run(faults, requests)
    report.broken += _miscounted(fleet, requests, before)
    _print(report)
    sys.exit(1 if report.broken else 0)


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    full = ", ".join(f"{count} {harm}" for harm, count in FULL_LOAD.items())
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--rate", type=float, default=10.0, help="streams a second to each ingress")
    parser.add_argument("--longest-pause", type=float, default=max(PAUSES_S), help="seconds")
    parser.add_argument("--only", default="", metavar="WORDS", help="only kinds whose name contains these words")
    parser.add_argument("--without", default="", metavar="WORDS", help="no kind whose name contains these words")
    parser.add_argument("--hostile-share", type=float, default=0.1, help=f"share of the full hostile load ({full})")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults and exit")
    return parser.parse_args()


def _miscounted(fleet: Fleet, answers: Sequence[Answer], before: Mapping[str, int]) -> list[str]:
    deadline = time.monotonic() + COUNTED_WITHIN_S
    while found := differences(answers, before, after := refused_counts(fleet, DEPLOYMENT)):
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    refused = sum(answer.was_refused for answer in answers)
    grown = ", ".join(f"{place} {count - before[place]}" for place, count in after.items())
    print(f"\nClients were refused {refused} times; counted: {grown}")
    return found


def _print_line(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)


def _under_test(fleet: Fleet) -> FleetUnderTest:
    begin = fleet.last_event()

    def trail() -> Iterable[Row]:
        yield from fleet.events(begin)
        yield from fleet.rows("incidents")

    return FleetUnderTest(
        home=HOME,
        web_url=SERVER,
        agents_url=AGENT_SERVER,
        cells=lambda: fleet.cells(DEPLOYMENT),
        nodes=lambda: {node["id"]: node for node in fleet.rows("nodes")},
        ingress_urls=lambda: {region["name"]: region["ingress_url"] for region in fleet.rows("regions")},
        is_whole=lambda: fleet.is_whole(DEPLOYMENT),
        open_incidents=lambda: [row["summary"] for row in fleet.rows("incidents", state="open")],
        sessions=lambda: (status := launched())["sessions"] | {"launcher": status["pid"]},
        last_pass_age_s=lambda: last_pass_age_s(timeout_s=ANSWER_WITHIN_S),
        trail=trail,
    )


def _print(report: Report) -> None:
    print(
        f"\n{len(report.faults)} faults, {report.requests} requests, {report.failed} failed; longest gap between two "
        f"passes {report.longest_pass_gap_s:.1f} s; whole again {report.calm_after_s:.1f} s after the last fault"
    )
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


def differences(answers: Iterable[Answer], before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    seen = sum(answer.was_refused for answer in answers)
    return [
        f"clients were refused {seen} times, {place} counted {count - before[place]}"
        for place, count in after.items()
        if count - before[place] != seen
    ]
