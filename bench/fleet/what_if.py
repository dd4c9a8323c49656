"""Time of a what-if for a rollout, a scaling and the loss of a region.

Uses a snapshot of a fleet in memory: `POST /api/v1/plan` adds the loading of the snapshot from PostgreSQL. Prints
a Markdown table with seconds of one core."""

import argparse
from time import process_time

from fleet.reconcile.planning.snapshot import VersionView
from simulator.clock import EPOCH
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.prediction import Change, LoseRegion, RollOut, Scale, predict
from simulator.scenarios import scenario_named

DEMO = FleetSpec(
    (
        DeploymentSpec("sim-70b", {"us-east-1": 2, "us-west-2": 2}, size=2),
        DeploymentSpec("smollm2", {"us-east-1": 1, "us-west-2": 1}, size=1),
    ),
    spares=1,
)
LOAD_S = {"v1": 60.0, "v2": 60.0}


def changes(name: str, shape: FleetSpec) -> dict[str, Change]:
    region = shape.regions[0]
    cells = next(spec.cells[region] for spec in shape.deployments if spec.name == name)
    size = next(spec.size for spec in shape.deployments if spec.name == name)
    policy = next(spec.policy for spec in shape.deployments if spec.name == name)
    return {
        "a rollout": RollOut(name, "v2", policy, VersionView(size, 600.0)),
        "three cells more": Scale(name, {region: cells + 3}),
        "a lost region": LoseRegion(region),
    }


def main(parser: argparse.ArgumentParser) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| fleet | change | s | steps | ends after |")
    print("| --- | --- | --- | --- | --- |")
    for label, name, shape in (
        ("the demo's", "sim-70b", DEMO),
        ("10,000 nodes", "model-03", scenario_named("day_10000_nodes").fleet),
    ):
        for kind, change in changes(name, shape).items():
            view = build_fleet(shape)
            began_s = process_time()
            forecast = predict(view, change, EPOCH, load_s=LOAD_S)
            spent_s = process_time() - began_s
            ends = "open" if forecast.took_s is None else f"{forecast.took_s:.0f} s"
            print(f"| {label} | {kind} | {spent_s:.2f} | {len(forecast.steps)} | {ends} |", flush=True)
