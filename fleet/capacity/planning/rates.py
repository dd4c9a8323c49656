"""Prices, power and emissions of machines, and how reliable each number is. Pure; accounting and planners use it. An
operator's current rate overrides the provider's price of the machine, which overrides dated lists. Unknown numbers are
never shown as figures."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import IntEnum, StrEnum

from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape, rated_chip_watts

MICRO_USD = 1_000_000

GRIDS: Mapping[str, float] = {
    "us-east-1": 379.069, "us-east-2": 410.608, "us-west-1": 322.167, "us-west-2": 322.167, "us-gov-east-1": 379.069,
    "us-gov-west-1": 322.167, "af-south-1": 900.6, "ap-east-1": 710, "ap-south-1": 708.2, "ap-northeast-1": 465.8,
    "ap-northeast-2": 415.6, "ap-northeast-3": 465.8, "ap-southeast-1": 408, "ap-southeast-2": 760,
    "ap-southeast-3": 717.7, "ca-central-1": 120, "cn-north-1": 537.4, "cn-northwest-1": 537.4, "eu-central-1": 311,
    "eu-north-1": 8.8, "eu-south-1": 213.4, "eu-west-1": 278.6, "eu-west-2": 225, "eu-west-3": 51.1,
    "me-central-1": 404.1, "me-south-1": 505.9, "sa-east-1": 61.7,
}  # fmt: skip
"""Grams of CO2 equivalent per kilowatt-hour, yearly average by place, without offsets:
https://github.com/cloud-carbon-footprint/cloud-carbon-footprint (EPA eGRID 2020, EEA, carbonfootprint.com), read on
2026-11-26."""
GRID_ANYWHERE = 392.782
"""Average of the same source, for places without an entry."""

OVERHEADS: Mapping[str, float] = {
    "eu-north-1": 1.1, "eu-west-1": 1.11, "us-west-2": 1.12, "us-east-2": 1.13, "us-east-1": 1.15, "sa-east-1": 1.17,
    "us-west-1": 1.18, "ca-central-1": 1.19, "af-south-1": 1.24, "cn-north-1": 1.25, "cn-northwest-1": 1.25,
    "ap-northeast-1": 1.27, "me-central-1": 1.27, "ap-southeast-1": 1.32, "me-south-1": 1.33, "eu-central-1": 1.35,
    "ap-southeast-3": 1.4, "ap-south-1": 1.42,
}  # fmt: skip
"""Power usage effectiveness: energy of a data centre per unit of energy that its machines use. AWS, Sustainability
Report 2024, read on 2026-11-26."""
OVERHEAD_ANYWHERE = 1.15
"""AWS's average, from the same report."""


class Source(IntEnum):
    """Reliability of a number; combined numbers take the weakest.

    MEASURED: metered or billed: the provider's price of this machine, an operator's rate. RATED: from a list, or a
    share of a rated maximum. ESTIMATED: from a model or an average. UNKNOWN: a part is missing."""

    MEASURED = 0
    RATED = 1
    ESTIMATED = 2
    UNKNOWN = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class RateKind(StrEnum):
    """Rates that operators set: US dollars an hour and watts of a machine by type; by region grams of CO2 equivalent
    for a kilowatt-hour, and power usage effectiveness; by deployment US dollars for a million tokens of prompts, cached
    prompts and completions."""

    MACHINE_PRICE = "machine_price"
    MACHINE_WATTS = "machine_watts"
    GRID_INTENSITY = "grid_intensity"
    PUE = "pue"
    PROMPT_PRICE = "prompt_price"
    CACHED_PRICE = "cached_price"
    COMPLETION_PRICE = "completion_price"


OF_MACHINES = frozenset({RateKind.MACHINE_PRICE, RateKind.MACHINE_WATTS})
"""Rates of instance types, in one or all regions."""
OF_TOKENS = frozenset({RateKind.PROMPT_PRICE, RateKind.CACHED_PRICE, RateKind.COMPLETION_PRICE})
"""Rates of deployments; the other rates are of regions."""
MOST = {
    RateKind.MACHINE_PRICE: Decimal(100_000),
    RateKind.MACHINE_WATTS: Decimal(1_000_000),
    RateKind.GRID_INTENSITY: Decimal(10_000),
    RateKind.PUE: Decimal(10),
    RateKind.PROMPT_PRICE: Decimal(1_000_000),
    RateKind.CACHED_PRICE: Decimal(1_000_000),
    RateKind.COMPLETION_PRICE: Decimal(1_000_000),
}
"""Higher values are mistakes in the unit."""
LEAST = {RateKind.PUE: Decimal(1)}
"""A data centre draws at least as much as its machines."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Valid from `valid_from` until the next one. `region` empty: regions without an own rate; `market` empty: markets
    without an own rate."""

    kind: RateKind
    subject: str
    region: str
    value: Decimal
    valid_from: datetime
    market: str = ""


@dataclass(frozen=True, slots=True)
class MachinePrice:
    """Millionths of a US dollar an hour."""

    micro_usd: int
    source: Source

    @property
    def usd(self) -> float | None:
        return None if self.source is Source.UNKNOWN else self.micro_usd / MICRO_USD

    def text(self) -> str:
        return "unknown price" if self.usd is None else f"{self.usd:.2f} $/h ({self.source.label})"


@dataclass(frozen=True, slots=True)
class PowerRating:
    """Maximum watts of a machine's accelerators, and of its other parts."""

    accelerators: float
    host: float


@dataclass(frozen=True, slots=True)
class Emission:
    """Micrograms of CO2 equivalent for a joule of a machine, PUE included."""

    ug_per_joule: Decimal
    source: Source


class Rates:
    def __init__(self, rates: Iterable[Rate], now: datetime) -> None:
        in_force: dict[tuple[RateKind, str, str, str], Decimal] = {}
        for rate in sorted(rates, key=lambda rate: rate.valid_from):
            if rate.valid_from <= now:
                in_force[rate.kind, rate.subject, rate.market, rate.region] = rate.value
        self._in_force = in_force

    def find(self, kind: RateKind, subject: str, region: str = "", market: str = "") -> Decimal | None:
        """Returns the rate of the market, else of all markets; among these of the region, else of all regions."""
        places = ((market, region), (market, ""), ("", region), ("", ""))
        found = (self._in_force.get((kind, subject, *place)) for place in places)
        return next((value for value in found if value is not None), None)


def machine_price(
    rates: Rates, shape: InstanceShape, region: str, stated: float | None, market: str = ""
) -> MachinePrice:
    """Returns the current price. `stated`: the provider's, in US dollars an hour; `market`: empty if unknown."""
    own = rates.find(RateKind.MACHINE_PRICE, shape.name, region, market)
    if own is not None:
        return MachinePrice(round(own * MICRO_USD), Source.MEASURED)
    if stated is not None:
        return MachinePrice(round(stated * MICRO_USD), Source.MEASURED)
    listed = shape.price_per_hour or _listed(shape).price_per_hour
    return MachinePrice(round(listed * MICRO_USD), Source.RATED if listed else Source.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Offer:
    """A market with the provider's price in US dollars an hour, or None."""

    market: str = ""
    usd: float | None = None


@dataclass(frozen=True)
class MachinePrices:
    """Prices at any time, including future rates: the operator's rate, else the provider's price, else the dated list.
    `offers`: (region, instance type) to the first pool's offer."""

    rates: tuple[Rate, ...] = ()
    shapes: Mapping[str, InstanceShape] = field(default_factory=dict)
    offers: Mapping[tuple[str, str], Offer] = field(default_factory=dict)

    def of(self, region: str, instance_type: str, at: datetime, offer: Offer | None = None) -> MachinePrice:
        """`offer`: of this machine or pool; None: of the next launch."""
        shape = self.shapes.get(instance_type) or INSTANCE_TYPES.get(instance_type) or InstanceShape(instance_type, "")
        asked = offer or self.offers.get((region, instance_type), Offer())
        return machine_price(Rates(self.rates, at), shape, region, asked.usd, asked.market)

    def changes(self, since: datetime, until: datetime) -> tuple[datetime, ...]:
        """Times within this period at which rates of machines begin, in order."""
        begun = {rate.valid_from for rate in self.rates if rate.kind is RateKind.MACHINE_PRICE}
        return tuple(sorted(at for at in begun if since < at < until))


def power_rating(rates: Rates, shape: InstanceShape, region: str) -> PowerRating | None:
    own = rates.find(RateKind.MACHINE_WATTS, shape.name, region)
    total = float(own) if own is not None else shape.watts or _listed(shape).watts
    if not total:
        return None
    each = rated_chip_watts(shape)
    if not each and shape.chips:
        return PowerRating(total, 0.0)  # no split is known: the whole machine counts as busy as its chips
    chips = min(total, shape.chips * each)
    return PowerRating(chips, total - chips)


def emission(rates: Rates, region: str, aws_region: str) -> Emission:
    """Of a region: grams/kWh x PUE as micrograms for a joule. `aws_region`: AWS's name, or ""."""
    grid, overhead = rates.find(RateKind.GRID_INTENSITY, region), rates.find(RateKind.PUE, region)
    sources = [
        Source.MEASURED if grid is not None else Source.RATED if aws_region in GRIDS else Source.ESTIMATED,
        Source.MEASURED if overhead is not None else Source.RATED if aws_region in OVERHEADS else Source.ESTIMATED,
    ]
    grams = grid if grid is not None else Decimal(str(GRIDS.get(aws_region, GRID_ANYWHERE)))
    factor = overhead if overhead is not None else Decimal(str(OVERHEADS.get(aws_region, OVERHEAD_ANYWHERE)))
    return Emission(grams * factor * 1_000_000 / 3_600_000, max(sources))


def _listed(shape: InstanceShape) -> InstanceShape:
    """Current list values for a row of an earlier release."""
    return INSTANCE_TYPES.get(shape.name, shape)
