"""A region of a cloud with pools of capacity, as rows."""

from typing import Any

from fleet.capacity.planning.pools import Market
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.regions.models import Region
from models_registry.instance_types.models import InstanceType

TYPE = "trn1.32xlarge"


def cloud_region(name: str = "us-east-1", state: str = "ready") -> Region:
    region, _ = Region.objects.get_or_create(name=name, defaults={"provider": "aws"})
    CloudRegion.objects.get_or_create(region=region, defaults={"aws_region": name, "stack": "a", "state": state})
    InstanceType.objects.get_or_create(name=TYPE, defaults={"accelerator": "trainium"})
    return region


def pool(position: int, market: Market = Market.ON_DEMAND, zone: str = "us-east-1a", **columns: Any) -> CapacityPool:
    where = columns.pop("region", "us-east-1")
    cloud_region(where)
    defaults = {
        "instance_type_id": TYPE,
        "zone_id": f"use1-{zone[-1]}",
        "subnet": f"subnet-{zone[-1]}",
        "image": "ami-1",
    }
    return CapacityPool.objects.create(
        region_id=where, position=position, market=market, zone=zone, **{**defaults, **columns}
    )


def order(region: str = "us-east-1") -> list[str]:
    """Names of the pools of `TYPE`, as they are tried."""
    pools = CapacityPool.objects.filter(region_id=region, instance_type_id=TYPE).order_by("position")
    return [row.view().name for row in pools]
