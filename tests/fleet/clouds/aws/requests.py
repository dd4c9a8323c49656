"""Launch requests as the provider builds them, and their golden files. After an intended change:

.venv/bin/python -m tests.fleet.clouds.aws.requests
"""

import json
from datetime import UTC, datetime
from pathlib import Path

from fleet.capacity.planning.pools import RESERVATIONS, Market, PoolView, UnitView
from fleet.clouds.aws.launch import Boot, LaunchBase, Request, network_of, run_instances, user_data
from fleet.clouds.planning.launches import AttemptView, token_of

GOLDEN = Path(__file__).with_name("golden")
TYPES = (
    "c7i.2xlarge",
    "g6.12xlarge",
    "g6e.48xlarge",
    "inf2.48xlarge",
    "p5.48xlarge",
    "p5en.48xlarge",
    "p6-b300.48xlarge",
    "trn1.2xlarge",
    "trn1.32xlarge",
    "trn1n.32xlarge",
    "trn2.48xlarge",
)
"""Each kind of layout once, on demand."""
MARKETS_OF = "trn1.32xlarge"
"""Has a golden file for each market."""

INSTALL = "sw-0123456789ab"
BASE = LaunchBase(
    INSTALL, "sg-0a1b2c3d4e5f60718", "arn:aws:iam::123456789012:instance-profile/switchyard-node", "/dev/xvda"
)
BOOT = Boot(
    "https://switchyard.example:8443", f"sha256//{'A' * 43}=", "us-east-1", INSTALL, "u-0a1b2c3d"
)  # fmt: skip
BEGUN = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def launch(instance_type: str, market: Market, *, count: int = 2, placement_group: str = "") -> Request:
    """Returns the request for a unit of such machines."""
    pool = PoolView(
        id=1,
        region="us-east-1",
        instance_type=instance_type,
        position=1,
        market=market,
        zone="us-east-1a",
        subnet="subnet-0a1b2c3d4e5f60718",
        image="ami-0a1b2c3d4e5f60718",
        reservation="cr-0a1b2c3d4e5f60718" if market in RESERVATIONS else "",
        placement_group=placement_group,
        max_price=12.5 if market is Market.SPOT else None,
    )
    unit = UnitView("u-0a1b2c3d", "us-east-1", instance_type, count, frozenset(Market))
    attempt = AttemptView(1, token_of(INSTALL, unit.id, 1), pool, count, BEGUN, BEGUN)
    return run_instances(unit, attempt, BASE, user_data(BOOT))


def sold(instance_type: str, market: Market) -> bool:
    wanted = {Market.SPOT: "spot", Market.BLOCK: "capacity-block"}.get(market, "on-demand")
    return wanted in network_of(instance_type).usage_classes


def golden_requests() -> dict[str, Request]:
    by_type = {name: launch(name, Market.ON_DEMAND, placement_group="switchyard-use1-az4") for name in TYPES}
    by_market = {f"{MARKETS_OF}.{market}": launch(MARKETS_OF, market) for market in Market}
    return by_type | by_market


def written(request: Request) -> str:
    """One line for each member of a list. The script has own tests."""
    lines = []
    for name, value in (request | {"UserData": "#!/bin/sh …"}).items():
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            shown = f"[\n{rows}\n  ]"
        lines.append(f"  {json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    for name, request in golden_requests().items():
        (GOLDEN / f"{name}.json").write_text(written(request))
