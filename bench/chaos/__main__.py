"""Breaks a running fleet at random for a while and says which promises did not hold.

    make chaos SECONDS=1800 SEED=1

Needs a fleet of `sim-70b` from `make up ENGINE=sim` (same SWITCHYARD_HOME) that nobody else uses. Exit status 1 if a
promise was broken. The same seed does the same faults in the same order; what they meet differs.
"""

import argparse
import sys
from datetime import UTC, datetime

from bench.chaos.campaign import Campaign, FleetUnderTest, Report
from bench.chaos.schedule import PAUSES_S, every_kind, schedule
from bench.live_fleet import HOME, Fleet, last_pass_age_s, launched, load, wait_for

DEPLOYMENT = "sim-70b"
WHOLE_WITHIN_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--rate", type=float, default=10.0, help="streams a second to each ingress")
    parser.add_argument("--longest-pause", type=float, default=max(PAUSES_S), help="seconds")
    options = parser.parse_args()
    fleet = Fleet()
    wait_for(lambda: fleet.is_whole(DEPLOYMENT), WHOLE_WITHIN_S, "the fleet is whole before the first fault")
    faults = schedule(options.seed, options.seconds, options.every, every_kind(options.longest_pause))
    campaign = Campaign(_under_test(fleet), options.seed, lambda line: print(f"{datetime.now(UTC):%H:%M:%S} {line}"))
    with load(fleet.ingresses(DEPLOYMENT), DEPLOYMENT, options.rate, max_tokens=24) as requests:
        report = campaign.run(faults, requests)
    _print(report)
    sys.exit(1 if report.broken else 0)


def _under_test(fleet: Fleet) -> FleetUnderTest:
    return FleetUnderTest(
        home=HOME,
        cells=lambda: fleet.cells(DEPLOYMENT),
        is_whole=lambda: fleet.is_whole(DEPLOYMENT),
        open_incidents=lambda: [row["summary"] for row in fleet.rows("incidents", state="open")],
        sessions=lambda: launched()["sessions"],
        last_pass_age_s=last_pass_age_s,
    )


def _print(report: Report) -> None:
    print(
        f"\n{len(report.faults)} faults, {report.requests} requests, {report.failed} failed; longest gap between two "
        f"passes {report.longest_pass_gap_s:.1f} s; whole again {report.calm_after_s:.1f} s after the last fault"
    )
    print("Every promise held." if not report.broken else f"{len(report.broken)} promises were broken:")
    for line in report.broken:
        print(f"  {line}")


if __name__ == "__main__":
    main()
