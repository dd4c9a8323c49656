"""Extracts AWS's instance types from moto's data. After an update of moto:

.venv/bin/python -m tests.fleet.clouds.aws.instance_types
"""

import gzip
import json
from importlib.resources import files
from typing import Any

from fleet.clouds.aws.launch import TABLE

FAMILIES = (
    *("trn", "inf2", "p3dn", "p4", "p5", "p6", "g4dn.", "g5.", "g5g.", "g6.", "g6e.", "g6f.", "g7.", "g7e.", "gr6."),
    "gr6f.",
)
"""Node types: those with accelerators that engines run on, and processors for which the stack has images."""
OTHERS = ("c7i.2xlarge",)

ABOUT = {
    "about": "Network cards of EC2's instance types, which of them can have an EFA, and how the type is sold.",
    "source": "DescribeInstanceTypes of AWS, as moto 5.2.5 carries it (moto/ec2/resources/instance_types.json.gz)",
    "licence": "Apache-2.0 (https://github.com/getmoto/moto/blob/5.2.5/LICENSE)",
}


def extract() -> dict[str, Any]:
    """Returns the content of `instance_interfaces.json`."""
    known = json.loads(gzip.decompress(files("moto").joinpath("ec2/resources/instance_types.json.gz").read_bytes()))
    names = sorted(name for name in known if name.startswith(FAMILIES) or name in OTHERS)
    return ABOUT | {"instance_types": {name: _row(known[name]) for name in names}}


def _row(known: dict[str, Any]) -> dict[str, Any]:
    cards = known["NetworkInfo"]["NetworkCards"]
    efas = sorted(card["NetworkCardIndex"] for card in cards if "efa-only" in card["InterfaceTypes"])
    assert len(efas) == known["NetworkInfo"].get("EfaInfo", {}).get("MaximumEfaInterfaces", 0), known["InstanceType"]
    return {"cards": len(cards), "efa_cards": efas, "usage_classes": sorted(known["SupportedUsageClasses"])}


def written(table: dict[str, Any]) -> str:
    head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in ABOUT)
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in table["instance_types"].items())
    return f'{{\n{head},\n  "instance_types": {{\n{rows}\n  }}\n}}\n'


if __name__ == "__main__":
    TABLE.write_text(written(extract()))
