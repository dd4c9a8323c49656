"""Public prices, ratings and emissions of machines, as dated data with their sources. Figures only: what an operator
states, or a provider answers, comes before them (`fleet.planning.rate`).

Prices: US dollars an hour, on demand, Linux, us-east-1. Watts: the most that may be drawn for long. Emissions: grams of
CO2 equivalent for a kilowatt-hour of the grid, a year's average by place, without what a tariff is said to offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True, slots=True)
class Dated:
    """Where figures come from, and when they were read there."""

    read_on: date
    source: str


PRICES_FROM = Dated(
    date(2026, 1, 19),
    "https://github.com/aws/karpenter-provider-aws/blob/main/pkg/providers/pricing/zz_generated.pricing_aws.go",
)
"""Generated there from AWS's price list; Apache-2.0. Trainium2 is in no such list."""

ON_DEMAND: Mapping[str, float] = {
    "c7i.2xlarge": 0.357, "g4dn.xlarge": 0.526, "g4dn.12xlarge": 3.912, "g5.xlarge": 1.006, "g5.12xlarge": 5.672,
    "g5.48xlarge": 16.288, "g6.xlarge": 0.8048, "g6.12xlarge": 4.6016, "g6.48xlarge": 13.3504, "g6e.xlarge": 1.861,
    "g6e.12xlarge": 10.49264, "g6e.48xlarge": 30.13118, "inf1.xlarge": 0.228, "inf1.24xlarge": 4.721,
    "inf2.xlarge": 0.7582, "inf2.8xlarge": 1.96786, "inf2.24xlarge": 6.49063, "inf2.48xlarge": 12.98127,
    "p4d.24xlarge": 21.957642, "p4de.24xlarge": 27.44705, "p5.4xlarge": 6.88, "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296, "p6-b200.48xlarge": 113.9328, "trn1.2xlarge": 1.34375, "trn1.32xlarge": 21.5,
    "trn1n.32xlarge": 24.78,
}  # fmt: skip

CHIP_WATTS: Mapping[str, float] = {"h100": 700, "h200": 700, "b200": 1000, "a100": 400, "l40s": 350, "l4": 72}
"""By accelerator, from NVIDIA's data sheets, "Max thermal design power", of SXM modules where there are some; read on
2026-11-26. AWS publishes none of its own chips: what they draw is unknown until an operator states it."""

VCPU_WATTS, VCPU_IDLE_WATTS = 3.5, 0.74
"""Of a machine with processors alone, for each vCPU at full and at no load. Cloud Carbon Footprint, "Methodology",
average of AWS's processors by SPECpower; read on 2026-11-26."""
IDLE_SHARE = VCPU_IDLE_WATTS / VCPU_WATTS
"""Of its most that a machine draws while it has nothing to do."""

DGX_WATTS = 10_200
"""NVIDIA DGX H100 and H200, data sheets, "System power usage": a machine of eight such modules and what is around them;
read on 2026-11-26. AWS publishes none of its machines."""

MACHINE_WATTS: Mapping[str, float] = {
    "local.cpu": VCPU_WATTS,
    "c7i.2xlarge": 8 * VCPU_WATTS,
    "g6.12xlarge": 4 * CHIP_WATTS["l4"] + 48 * VCPU_WATTS,
    "p5.48xlarge": DGX_WATTS,
    "p5en.48xlarge": DGX_WATTS,
}

GRIDS_FROM = Dated(
    date(2026, 11, 26),
    "https://github.com/cloud-carbon-footprint/cloud-carbon-footprint (EPA eGRID 2020, EEA, carbonfootprint.com)",
)
GRIDS: Mapping[str, float] = {
    "us-east-1": 379.069, "us-east-2": 410.608, "us-west-1": 322.167, "us-west-2": 322.167, "us-gov-east-1": 379.069,
    "us-gov-west-1": 322.167, "af-south-1": 900.6, "ap-east-1": 710, "ap-south-1": 708.2, "ap-northeast-1": 465.8,
    "ap-northeast-2": 415.6, "ap-northeast-3": 465.8, "ap-southeast-1": 408, "ap-southeast-2": 760,
    "ap-southeast-3": 717.7, "ca-central-1": 120, "cn-north-1": 537.4, "cn-northwest-1": 537.4, "eu-central-1": 311,
    "eu-north-1": 8.8, "eu-south-1": 213.4, "eu-west-1": 278.6, "eu-west-2": 225, "eu-west-3": 51.1,
    "me-central-1": 404.1, "me-south-1": 505.9, "sa-east-1": 61.7,
}  # fmt: skip
GRID_ANYWHERE = 392.782
"""Their average, of the same source: for a place that no table has."""

OVERHEADS_FROM = Dated(date(2026, 11, 26), "AWS, Sustainability Report 2024, power usage effectiveness by region")
OVERHEADS: Mapping[str, float] = {
    "eu-north-1": 1.1, "eu-west-1": 1.11, "us-west-2": 1.12, "us-east-2": 1.13, "us-east-1": 1.15, "sa-east-1": 1.17,
    "us-west-1": 1.18, "ca-central-1": 1.19, "af-south-1": 1.24, "cn-north-1": 1.25, "cn-northwest-1": 1.25,
    "ap-northeast-1": 1.27, "me-central-1": 1.27, "ap-southeast-1": 1.32, "me-south-1": 1.33, "eu-central-1": 1.35,
    "ap-southeast-3": 1.4, "ap-south-1": 1.42,
}  # fmt: skip
"""Power usage effectiveness: energy of a data centre for each that its machines take."""
OVERHEAD_ANYWHERE = 1.15
"""AWS's own average, of the same report."""
