"""What a machine costs, draws and emits, and how well that is known. Pure. Accounting and planners take it from here.

An operator's rate in force comes first, then what the provider says of this very machine, then dated lists. What nobody
states is unknown, and nothing that rests on it is shown as a figure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import IntEnum, StrEnum

from models_registry.versions.planning.machines import (
    CHIP_WATTS,
    GRID_ANYWHERE,
    GRIDS,
    INSTANCE_TYPES,
    OVERHEAD_ANYWHERE,
    OVERHEADS,
    InstanceShape,
)

MICRO_USD = 1_000_000


class Source(IntEnum):
    """How well a number is known; of numbers that are put together, the greatest counts.

    MEASURED: by a meter, or what the bill says: the provider's price of this machine, an operator's own rate. RATED:
    out of a list, or a share of a rated maximum. ESTIMATED: by a model or an average. UNKNOWN: a part of it is.
    """

    MEASURED = 0
    RATED = 1
    ESTIMATED = 2
    UNKNOWN = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class RateKind(StrEnum):
    """What an operator may state: US dollars an hour and watts of a machine by its type; by region grams of CO2
    equivalent for a kilowatt-hour, and the power usage effectiveness; and by deployment US dollars that tenants are
    charged for a million tokens of prompts, of prompts out of a cache, and of completions."""

    MACHINE_PRICE = "machine_price"
    MACHINE_WATTS = "machine_watts"
    GRID_INTENSITY = "grid_intensity"
    PUE = "pue"
    PROMPT_PRICE = "prompt_price"
    CACHED_PRICE = "cached_price"
    COMPLETION_PRICE = "completion_price"


OF_MACHINES = frozenset({RateKind.MACHINE_PRICE, RateKind.MACHINE_WATTS})
"""Rates of instance types, in one region or in all."""
OF_TOKENS = frozenset({RateKind.PROMPT_PRICE, RateKind.CACHED_PRICE, RateKind.COMPLETION_PRICE})
"""Rates of deployments; the others are of regions."""
MOST = {
    RateKind.MACHINE_PRICE: Decimal(100_000),
    RateKind.MACHINE_WATTS: Decimal(1_000_000),
    RateKind.GRID_INTENSITY: Decimal(10_000),
    RateKind.PUE: Decimal(10),
    RateKind.PROMPT_PRICE: Decimal(1_000_000),
    RateKind.CACHED_PRICE: Decimal(1_000_000),
    RateKind.COMPLETION_PRICE: Decimal(1_000_000),
}
"""More than any machine, place or model has: a slip of the unit."""
LEAST = {RateKind.PUE: Decimal(1)}
"""A data centre takes no less than its machines do."""


@dataclass(frozen=True, slots=True)
class Rate:
    """From `valid_from` until a later one. `region` empty: in all that have no rate of their own; `market`: of machines
    that are bought in it alone, empty: of all that it has no rate of its own for."""

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
        """US dollars an hour; None: unknown."""
        return None if self.source is Source.UNKNOWN else self.micro_usd / MICRO_USD

    def text(self) -> str:
        """ "6.45 $/h (rated)"."""
        return "a price that nobody states" if self.usd is None else f"{self.usd:.2f} $/h ({self.source.label})"


@dataclass(frozen=True, slots=True)
class PowerRating:
    """The most watts of a machine's accelerators, and of the rest of it."""

    accelerators: float
    host: float


@dataclass(frozen=True, slots=True)
class Emission:
    """Micrograms of CO2 equivalent for a joule that a machine takes, what is around it included."""

    ug_per_joule: Decimal
    source: Source


class Rates:
    """The operator's rates in force at one time."""

    def __init__(self, rates: Iterable[Rate], now: datetime) -> None:
        in_force: dict[tuple[RateKind, str, str, str], Decimal] = {}
        for rate in sorted(rates, key=lambda rate: rate.valid_from):
            if rate.valid_from <= now:
                in_force[rate.kind, rate.subject, rate.market, rate.region] = rate.value
        self._in_force = in_force

    def find(self, kind: RateKind, subject: str, region: str = "", market: str = "") -> Decimal | None:
        """The one of the market, or else of all markets; of these the one of the region, or else of all regions."""
        places = ((market, region), (market, ""), ("", region), ("", ""))
        found = (self._in_force.get((kind, subject, *place)) for place in places)
        return next((value for value in found if value is not None), None)


def machine_price(
    rates: Rates, shape: InstanceShape, region: str, stated: float | None, market: str = ""
) -> MachinePrice:
    """What a machine costs now. `stated`: what its provider says of it, in US dollars an hour; `market`: how it is
    bought, empty: unknown."""
    own = rates.find(RateKind.MACHINE_PRICE, shape.name, region, market)
    if own is not None:
        return MachinePrice(round(own * MICRO_USD), Source.MEASURED)
    if stated is not None:
        return MachinePrice(round(stated * MICRO_USD), Source.MEASURED)
    listed = shape.price_per_hour or _listed(shape).price_per_hour
    return MachinePrice(round(listed * MICRO_USD), Source.RATED if listed else Source.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Offer:
    """How a machine is bought, and what its provider asks for one: US dollars an hour, None: not known."""

    market: str = ""
    usd: float | None = None


@dataclass(frozen=True)
class MachinePrices:
    """What machines cost at any time, the future as far as rates begin there: the operator's rate in force, else what
    the provider asks, else the dated list. `offers`: (region, instance type) -> that of the pool which is tried first.
    """

    rates: tuple[Rate, ...] = ()
    shapes: Mapping[str, InstanceShape] = field(default_factory=dict)
    offers: Mapping[tuple[str, str], Offer] = field(default_factory=dict)

    def of(self, region: str, instance_type: str, at: datetime, offer: Offer | None = None) -> MachinePrice:
        """`offer`: that of this very machine or pool; None: of what would be launched next."""
        shape = self.shapes.get(instance_type) or INSTANCE_TYPES.get(instance_type) or InstanceShape(instance_type, "")
        asked = offer or self.offers.get((region, instance_type), Offer())
        return machine_price(Rates(self.rates, at), shape, region, asked.usd, asked.market)

    def changes(self, since: datetime, until: datetime) -> tuple[datetime, ...]:
        """When rates of machines begin within this time, in order: prices stay as they are between."""
        begun = {rate.valid_from for rate in self.rates if rate.kind is RateKind.MACHINE_PRICE}
        return tuple(sorted(at for at in begun if since < at < until))


def power_rating(rates: Rates, shape: InstanceShape, region: str) -> PowerRating | None:
    """None: nobody states what such a machine draws."""
    own = rates.find(RateKind.MACHINE_WATTS, shape.name, region)
    total = float(own) if own is not None else shape.watts or _listed(shape).watts
    if not total:
        return None
    if shape.accelerator not in CHIP_WATTS and shape.chips:
        return PowerRating(total, 0.0)  # nobody says which part is whose: the whole machine is as busy as its chips
    chips = min(total, shape.chips * CHIP_WATTS.get(shape.accelerator, 0.0))
    return PowerRating(chips, total - chips)


def emission(rates: Rates, region: str, aws_region: str) -> Emission:
    """Of a region; `aws_region`: as AWS calls it, empty elsewhere. grams/kWh x PUE, as micrograms for a joule."""
    grid, overhead = rates.find(RateKind.GRID_INTENSITY, region), rates.find(RateKind.PUE, region)
    sources = [
        Source.MEASURED if grid is not None else Source.RATED if aws_region in GRIDS else Source.ESTIMATED,
        Source.MEASURED if overhead is not None else Source.RATED if aws_region in OVERHEADS else Source.ESTIMATED,
    ]
    grams = grid if grid is not None else Decimal(str(GRIDS.get(aws_region, GRID_ANYWHERE)))
    factor = overhead if overhead is not None else Decimal(str(OVERHEADS.get(aws_region, OVERHEAD_ANYWHERE)))
    return Emission(grams * factor * 1_000_000 / 3_600_000, max(sources))


def _listed(shape: InstanceShape) -> InstanceShape:
    """What the lists of today say, for a row of an earlier release."""
    return INSTANCE_TYPES.get(shape.name, shape)
