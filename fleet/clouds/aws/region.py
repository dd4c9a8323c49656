"""Reads the outputs of a region's stack (`deploy/aws/region.yaml`), the capacity of its zones, and machine prices: on
demand from AWS's price list, spot from its history. Changes nothing, in AWS or here. Errors name the stack and the
missing output, so that an operator knows what to update. Ambiguous prices are left out: an unknown price is better than
a wrong one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine_agent.protocol.strict_json import strict_loads
from fleet.capacity.planning.pools import Market
from fleet.clouds.aws.calls import Refused, call, pages
from fleet.clouds.aws.launch import TAG_INSTALL, instance_networks
from fleet.clouds.planning.upkeep import CloudBase, ZoneBase
from models_registry.instance_types.planner import INSTANCE_TYPES, NEURON, NO_VENDOR, NVIDIA, InstanceShape

PRICE_LIST = "us-east-1"
"""One of the regions that serve the price list of all regions
(https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html)."""
LINUX = {
    "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
}  # fmt: skip
SPOT_PRODUCT = "Linux/UNIX"
PAGES_MOST = 10

Call = Callable[..., dict[str, Any]]


def on_demand_prices(region: str, types: Iterable[str], send: Call = call) -> dict[str, float]:
    """Returns US dollars per machine hour by type, for types with exactly one price in the list. `region` as AWS names
    it. Raises CallFailed if the list was not read."""
    found = {
        kind: {price for product in _price_list_products(region, kind, send) for price in prices_of(product)}
        for kind in types
    }
    return {kind: prices.pop() for kind, prices in found.items() if len(prices) == 1}


def _price_list_products(region: str, kind: str, send: Call) -> Iterator[str]:
    asked = {"instanceType": kind, "regionCode": region, **LINUX}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in asked.items()]
    token = ""
    for _ in range(PAGES_MOST):
        more = {"NextToken": token} if token else {}
        page = send("pricing", "GetProducts", PRICE_LIST, ServiceCode="AmazonEC2", Filters=filters, **more)
        yield from page["PriceList"]
        token = page.get("NextToken") or ""
        if not token:
            return


def prices_of(product: str) -> set[float]:
    """Returns the on-demand prices of a product in US dollars an hour. Prices of 0 belong to reservations and are left
    out."""
    try:
        terms = strict_loads(product)["terms"].get("OnDemand", {})
        dimensions = [one for term in terms.values() for one in term["priceDimensions"].values()]
        prices = {float(one["pricePerUnit"]["USD"]) for one in dimensions if one["unit"] == "Hrs"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {price for price in prices if 0 < price < float("inf")}


def spot_prices(region: str, types: Iterable[str], now: datetime) -> dict[tuple[str, str], float]:
    """Returns US dollars per spot machine hour by type and zone. Raises CallFailed if the history was not read."""
    asked = {"InstanceTypes": sorted(types), "ProductDescriptions": [SPOT_PRODUCT], "StartTime": now}
    rows = [row for page in pages("DescribeSpotPriceHistory", region, **asked) for row in page["SpotPriceHistory"]]
    return latest(rows)


def latest(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Returns the latest price of each type and zone in history rows."""
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    for row in rows:
        key, at = (row["InstanceType"], row["AvailabilityZone"]), row["Timestamp"]
        if key not in newest or newest[key][0] < at:
            newest[key] = (at, float(row["SpotPrice"]))
    return {key: price for key, (_, price) in newest.items() if price > 0}


DONE = frozenset({"CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"})
"""Stack states in which the outputs are valid."""
ZONES = "ABCD"
TARGET_OUTPUTS: Mapping[str, str] = {
    "tls": "EntryTargets", "plain": "PlainTargets", "grpc": "GrpcTargets", "plain_grpc": "PlainGrpcTargets",
}  # fmt: skip
"""Target groups by the names of `CloudBase.target_groups`; a stack may lack each."""
NEEDED = (
    "Install", "ZoneA", "SubnetA", "NodeGroup", "NodeProfile", "IngressGroup", "IngressProfile", "ArtifactBucket",
    "NoticeQueue", "DeadNoticeQueue", "EntryAddress", "EntryZone", "EntryTargets",
)  # fmt: skip
IMAGE_OUTPUTS: Mapping[str, str] = {
    "NeuronImage": "x86_64", "Trn1Image": "x86_64", "GpuImage": "x86_64", "GpuArmImage": "arm64",
    "CpuImage": "x86_64", "CpuArmImage": "arm64",
}  # fmt: skip
"""The images of a stack, with the processors that they run on, as EC2 names them."""
TOPOLOGY_IDS = 10


class StackRefused(Exception):
    """This install cannot use the stack; the text says why."""


@dataclass(frozen=True, slots=True)
class PoolFound:
    """Columns of a `fleet.capacity.planning.pools.PoolView`."""

    instance_type: str
    market: Market
    zone: str
    zone_id: str
    subnet: str
    image: str
    reservation: str = ""
    placement_group: str = ""
    network_nodes: tuple[str, ...] = ()
    ends_at: datetime | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class RegionRead:
    """A stack's outputs, and its pools in order of use."""

    base: CloudBase
    pools: tuple[PoolFound, ...]


def region_read(
    region: str, stack: str, install: str, types: Mapping[str, InstanceShape], send: Call = call
) -> RegionRead:
    """Reads a stack. `region` as AWS names it. `types`: wanted instance types by name; others are left out. Raises
    StackRefused if the stack does not exist, is being changed, belongs to another install, lacks an output, or names an
    image that does not exist or has another architecture. Raises fleet.clouds.aws.calls.CallFailed if AWS did not
    answer or denied the call."""
    needed = (*NEEDED, *IMAGE_OUTPUTS)
    outputs, account = stack_outputs(region, stack, install, send, needed, "deploy/aws/region.yaml")
    base = _cloud_base(region, stack, outputs, account, send)
    images = {name: image_of(types[name], outputs) for name in sorted(set(types) & set(instance_networks()))}
    reserved = _reserved_pools(region, outputs["Install"], images, base, send)
    return RegionRead(base, (*reserved, *_on_demand_pools(region, images, base, send)))


def stack_outputs(
    region: str, stack: str, install: str, send: Call, needed: Sequence[str], template: str
) -> tuple[dict[str, str], str]:
    """Returns the outputs of a complete stack of this install, and its account. Raises StackRefused and CallFailed as
    `region_read` does."""
    try:
        found = send("cloudformation", "DescribeStacks", region, StackName=stack)["Stacks"][0]
    except Refused as error:
        if error.code == "ValidationError":
            raise StackRefused(f"there is no stack {stack} in {region}: {error.text}") from None
        raise
    if found["StackStatus"] not in DONE:
        raise StackRefused(f"stack {stack} is {found['StackStatus']}; it is read again once it is complete")
    outputs = {each["OutputKey"]: each["OutputValue"] for each in found.get("Outputs") or ()}
    if missing := [name for name in needed if not outputs.get(name)]:
        raise StackRefused(f"stack {stack} has no output {', '.join(missing)}: deploy it again from {template}")
    if outputs["Install"] != install:
        whose = f"stack {stack} is of install {outputs['Install']}, and this one is {install}"
        raise StackRefused(f"{whose}: deploy one with Install={install}")
    return outputs, found["StackId"].split(":")[4]


def _cloud_base(region: str, stack: str, outputs: Mapping[str, str], account: str, send: Call) -> CloudBase:
    subnets = {outputs[f"Zone{each}"]: outputs[f"Subnet{each}"] for each in ZONES if f"Subnet{each}" in outputs}
    described = send("ec2", "DescribeSubnets", region, SubnetIds=sorted(subnets.values()))["Subnets"]
    zone_ids = {each["SubnetId"]: each["AvailabilityZoneId"] for each in described}
    images = sorted({outputs[name] for name in IMAGE_OUTPUTS})
    try:
        found = send("ec2", "DescribeImages", region, ImageIds=images)["Images"]
    except Refused as error:
        if error.code != "InvalidAMIID.NotFound":
            raise
        raise StackRefused(f"stack {stack} names an image that does not exist in {region}: {error.text}") from None
    architectures = {each["ImageId"]: each["Architecture"] for each in found}
    for name, wanted in IMAGE_OUTPUTS.items():
        if (is_for := architectures.get(outputs[name], wanted)) != wanted:
            raise StackRefused(f"{name} of stack {stack} is {outputs[name]} for {is_for}; it must be for {wanted}")
    return CloudBase(
        account=account,
        zones={zone: ZoneBase(subnet, zone_ids[subnet]) for zone, subnet in subnets.items()},
        node_group=outputs["NodeGroup"],
        node_profile=outputs["NodeProfile"],
        node_role=_role_name(outputs["NodeProfile"]),
        ingress_group=outputs["IngressGroup"],
        ingress_profile=outputs["IngressProfile"],
        ingress_role=_role_name(outputs["IngressProfile"]),
        bucket=outputs["ArtifactBucket"],
        queue_url=outputs["NoticeQueue"],
        dead_letter_url=outputs["DeadNoticeQueue"],
        target_groups={name: outputs[output] for name, output in TARGET_OUTPUTS.items() if outputs.get(output)},
        load_balancer=outputs["EntryAddress"],
        load_balancer_zone=outputs["EntryZone"],
        hosted_zone=outputs.get("HostedZoneId", ""),
        entry_name=outputs.get("EntryName", ""),
        home=outputs.get("BaseRegion", ""),
        root_devices={each["ImageId"]: each["RootDeviceName"] for each in found},
    )


def _role_name(profile: str) -> str:
    """base.yaml gives a role and its profile one name."""
    return profile.rpartition("/")[2]


def image_of(shape: InstanceShape, outputs: Mapping[str, str]) -> str:
    """The image for machines of a type, by its accelerators and the architecture of its processor."""
    alike = (one.vendor for one in INSTANCE_TYPES.values() if one.accelerator == shape.accelerator)
    vendor = shape.vendor or next(alike, NO_VENDOR)
    if vendor == NEURON:
        return outputs["Trn1Image" if shape.accelerator in SDK_2_28 else "NeuronImage"]
    kind = "Gpu" if vendor == NVIDIA else "Cpu"
    return outputs[f"{kind}ArmImage" if shape.cpu_arch == "arm64" else f"{kind}Image"]


SDK_2_28 = frozenset({"trainium", "inferentia2"})
"""Accelerators that later releases of NxD Inference do not support."""


def _on_demand_pools(region: str, images: Mapping[str, str], base: CloudBase, send: Call) -> Iterable[PoolFound]:
    """One pool for each zone that offers a type, in the stack's order. `images`: by wanted type."""
    sold = [each for each in images if "on-demand" in instance_networks()[each].usage_classes]
    if not sold:
        return []
    filters = [{"Name": "instance-type", "Values": sold}, {"Name": "location", "Values": sorted(base.zones)}]
    asked: dict[str, Any] = {"LocationType": "availability-zone", "Filters": filters}
    offered: set[tuple[str, str]] = set()
    token = ""
    while True:
        more = {"NextToken": token} if token else {}
        page = send("ec2", "DescribeInstanceTypeOfferings", region, **asked, **more)
        offered |= {(each["InstanceType"], each["Location"]) for each in page["InstanceTypeOfferings"]}
        token = page.get("NextToken") or ""
        if not token:
            break
    return [
        PoolFound(kind, Market.ON_DEMAND, zone, of.zone_id, of.subnet, images[kind])
        for kind in sold
        for zone, of in base.zones.items()
        if (kind, zone) in offered
    ]


def _reserved_pools(
    region: str, install: str, images: Mapping[str, str], base: CloudBase, send: Call
) -> list[PoolFound]:
    """Reservations and Capacity Blocks with the install's tag: by it an operator assigns them to this install."""
    filters = [{"Name": f"tag:{TAG_INSTALL}", "Values": [install]}, {"Name": "state", "Values": ["active"]}]
    found = send("ec2", "DescribeCapacityReservations", region, Filters=filters)["CapacityReservations"]
    ours = [each for each in found if each["InstanceType"] in images and each["AvailabilityZone"] in base.zones]
    ours.sort(key=lambda each: (each["InstanceType"], each["CapacityReservationId"]))
    ids = [each["CapacityReservationId"] for each in ours]
    nodes: dict[str, tuple[str, ...]] = {}
    for first in range(0, len(ids), TOPOLOGY_IDS):
        asked = {"CapacityReservationIds": ids[first : first + TOPOLOGY_IDS]}
        placed = send("ec2", "DescribeCapacityReservationTopology", region, **asked)["CapacityReservations"]
        nodes |= {each["CapacityReservationId"]: tuple(each.get("NetworkNodes") or ()) for each in placed}
    return [
        _of_reservation(each, base, nodes.get(each["CapacityReservationId"], ()), images[each["InstanceType"]])
        for each in ours
    ]


def _of_reservation(found: Mapping[str, Any], base: CloudBase, nodes: tuple[str, ...], image: str) -> PoolFound:
    zone = base.zones[found["AvailabilityZone"]]
    market = Market.RESERVED
    if found.get("ReservationType") == "capacity-block":
        market = Market.BLOCK
    elif found.get("Interruptible"):
        market = Market.INTERRUPTIBLE
    return PoolFound(
        instance_type=found["InstanceType"],
        market=market,
        zone=found["AvailabilityZone"],
        zone_id=zone.zone_id,
        subnet=zone.subnet,
        image=image,
        reservation=found["CapacityReservationId"],
        placement_group=found.get("PlacementGroupArn", "").rpartition("/")[2],
        network_nodes=nodes,
        ends_at=found.get("EndDate"),
        free=found.get("AvailableInstanceCount"),
    )
