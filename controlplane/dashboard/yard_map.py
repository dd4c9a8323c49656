"""The yard map: every live cell by region and deployment, filled by one figure. Reads only, in a constant number of
queries. Small fleets are tiles; above `TILES` cells each line is a bar with one segment for each fill. All users of a
process share cells and fills until a table that they come from changes, or load is sampled again."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from math import ceil
from string import ascii_uppercase

from django.db import connection

from controlplane.dashboard.templatetags.switchyard import NOTHING, ms, share
from engine_agent.protocol.states import CellRole
from fleet.capacity.selectors import machine_prices
from fleet.deployments.pages.data import Placed, RegionCells
from fleet.deployments.selectors import concurrency_by_type
from fleet.load.models import NodeWindow
from fleet.load.planner import FINE_S, MINUTE_S
from fleet.load.selectors import FLEET, last_sample_at
from fleet.reconcile.planning.states import CELL_TONE, CellState
from fleet.regions.models import Region
from kernel.row_cache import SharedRead
from kernel.tones import Tone
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.engine_arguments import nodes_per_cell
from models_registry.versions.planning.roles import role_concurrency
from models_registry.versions.planning.spec import InvalidVersion
from traffic.region_shares.models import RegionLoss
from traffic.region_shares.selectors.traffic import traffic_policies

TILES = 500
"""Cells that the map shows as tiles; above this number each line is a bar."""
LEVELS = 10
LETTERS = ascii_uppercase
FRESH = timedelta(seconds=4 * FINE_S)
FRESH_OF_NODES = timedelta(seconds=4 * MINUTE_S)


class Shade(StrEnum):
    """The figure that fills a tile; the value is the parameter `map` of the URL."""

    LOAD = "load"
    TTFT = "ttft"
    KV_CACHE = "kv"
    VERSION = "version"
    TEMPERATURE = "temperature"
    COST = "cost"


SHADES = {
    Shade.LOAD: ("Load", "Requests in flight and queued, against the tested capacity of the cell"),
    Shade.TTFT: ("TTFT", "95th percentile of the time to first token, against the deployment's objective"),
    Shade.KV_CACHE: ("KV cache", "Share of the KV cache that is in use"),
    Shade.VERSION: ("Version", "Model version"),
    Shade.TEMPERATURE: ("Temperature", "Hottest device of the cell in the last minutes, of 100 °C"),
    Shade.COST: ("Cost", "Price of the cell's machines, against the dearest cell"),
}
"""Label and what the fill means."""
_CELLS = """
SELECT cell.id, cell.deployment_id, cell.region_id, cell.state, cell.reason, cell.instance_type_id, cell.role,
    cell.model_version_id, load.in_flight + load.queued, load.ttft_p95_ms, load.kv_percent
FROM fleet_cell cell
LEFT JOIN fleet_loadsubject subject ON subject.name = 'cell:' || cell.id
LEFT JOIN LATERAL (
    SELECT in_flight, queued, ttft_p95_ms, kv_percent FROM fleet_loadwindow
    WHERE subject_id = subject.id AND step_s = %(step_s)s AND at > %(since)s ORDER BY at DESC LIMIT 1
) load ON true
WHERE cell.state <> 'stopped' ORDER BY cell.created_at, cell.id
"""


_TEMPERATURES = """
SELECT member.cell_id, max(used.temperature_c)
FROM fleet_nodewindow used
JOIN fleet_loadsubject subject ON subject.id = used.subject_id
JOIN fleet_cellmember member ON subject.name = 'node:' || member.node_id
WHERE used.step_s = %(step_s)s AND used.at > %(since)s AND used.temperature_c IS NOT NULL GROUP BY member.cell_id
"""


@dataclass(frozen=True, slots=True)
class YardCell:
    """A live cell. `requests`: in flight and queued in its last window; None without a recent one."""

    id: str
    deployment: str
    region: str
    state: str
    reason: str
    instance_type: str
    role: str
    version: int
    requests: float | None
    ttft_ms: float | None
    kv_percent: float | None

    @property
    def tone(self) -> Tone:
        return CELL_TONE[CellState(self.state)]


@dataclass(frozen=True, slots=True)
class Yard:
    """All live cells. `versions` by primary key; `tested`: cell -> concurrent requests that it was tested for, without
    prefill cells, which answer no client; `per_cell`: the mean over ready cells."""

    cells: tuple[YardCell, ...]
    versions: Mapping[int, ModelVersion]
    tested: Mapping[str, int]
    per_cell: float
    _painted: dict[object, "Painted"] = field(default_factory=dict, compare=False, repr=False)

    def painted(self, key: object, paint: "Paint") -> "Painted":
        """Its tiles by place. `key`: all that `paint` depends on besides the cells; few differ while a yard is used."""
        if key not in self._painted:
            tiles: dict[tuple[str, str], list[Tile]] = defaultdict(list)
            for cell in self.cells:
                tiles[cell.deployment, cell.region].append(Tile(cell, paint(cell)))
            self._painted[key] = {place: PaintedPlace.of(there) for place, there in tiles.items()}
        return self._painted[key]


@dataclass(frozen=True, slots=True)
class Fill:
    """How full a cell is drawn. `value` orders cells and averages (None: unknown); `level` is 0 to 10; `letter` is that
    of a version, else ""."""

    value: float | None
    text: str
    level: int = 0
    letter: str = ""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    cell: YardCell
    fill: Fill

    @property
    def label(self) -> str:
        """Its name, state and figure, if that is known."""
        known = "" if self.fill.text == NOTHING else f", {self.fill.text}"
        return f"{self.cell.id} {self.cell.state}{known}"

    @property
    def tone(self) -> Tone:
        return Tone.WARN if self.fill.is_over and self.cell.tone is Tone.OK else self.cell.tone


@dataclass(frozen=True, slots=True)
class PaintedPlace:
    """The cells of a deployment in a region. `fills`: number of cells by place of their tone and by level, in the order
    of a bar; `worst`: the one with the highest value, if any is known."""

    tiles: tuple[Tile, ...] = ()
    fills: tuple[tuple[int, int, int], ...] = ()
    worst: Tile | None = None

    @classmethod
    def of(cls, tiles: Sequence[Tile]) -> "PaintedPlace":
        counted = Counter((_TONES.index(tile.tone), tile.fill.level) for tile in tiles)
        valued = [tile for tile in tiles if tile.fill.value is not None]
        worst = max(valued, key=lambda tile: tile.fill.value or 0.0, default=None)
        return cls(tuple(tiles), tuple((tone, level, cells) for (tone, level), cells in sorted(counted.items())), worst)


@dataclass(frozen=True, slots=True)
class Segment:
    """Cells with the same state and fill as a part of a bar; `start` and `width` in per cent of the bar."""

    tone: Tone
    level: int
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class YardLine:
    """A deployment in a region: its `tiles` or, in a large fleet, the `segments` of a bar. `text`: the figure over all
    its cells; `worst`: the cell with the highest value."""

    deployment: str
    share: RegionCells
    tiles: tuple[Tile, ...]
    segments: tuple[Segment, ...]
    states: tuple[tuple[str, Tone, int], ...]
    text: str
    worst: Tile | None

    @property
    def troubles(self) -> tuple[tuple[str, Tone, int], ...]:
        """States of cells that are not ready; the number of ready ones is at the end of the line."""
        return tuple(state for state in self.states if state[0] != CellState.READY)

    @property
    def missing(self) -> range:
        """One for each wanted cell that does not exist yet."""
        return range(0 if self.segments else max(0, self.share.wanted - self.share.existing))


@dataclass(frozen=True, slots=True)
class YardRegion:
    """`loss`: what its loss would break, or None without recent forecasts."""

    region: Region
    loss: RegionLoss | None
    lines: tuple[YardLine, ...]


@dataclass(frozen=True, slots=True)
class YardMap:
    """`shades`: value, label and meaning of all. `letters`: letter, version and level, if cells have
    letters."""

    regions: tuple[YardRegion, ...]
    shade: Shade
    is_bars: bool
    letters: tuple[tuple[str, str, int], ...]

    @property
    def shades(self) -> tuple[tuple[str, str, str], ...]:
        return tuple((shade.value, *SHADES[shade]) for shade in Shade)

    @property
    def meaning(self) -> str:
        return SHADES[self.shade][1]


Paint = Callable[[YardCell], Fill]
Painted = Mapping[tuple[str, str], PaintedPlace]
"""By deployment and region."""
_NO_CELLS = PaintedPlace()


def yard_map(placed: Sequence[Placed], yard: Yard, shade: str, now: datetime, *, tiles: int | None = None) -> YardMap:
    """The cells of these deployments by region, including regions without cells. One query, four for the cost, or two
    for the temperature."""
    chosen = Shade(shade) if shade in set(Shade) else Shade.LOAD
    letters = _letters(yard) if chosen is Shade.VERSION else {}
    key, paint = _painter(chosen, placed, yard, letters, now)
    painted = yard.painted((chosen, key), paint)
    is_bars = len(yard.cells) > (TILES if tiles is None else tiles)
    lines: dict[str, list[YardLine]] = defaultdict(list)
    for deployment, shares in placed:
        for there in shares:
            place = painted.get((deployment.name, there.region), _NO_CELLS)
            lines[there.region].append(_line(deployment.name, there, place, is_bars))
    regions = tuple(
        YardRegion(region, getattr(region, "loss", None), tuple(lines[region.name]))
        for region in Region.objects.select_related("loss")
    )
    named = tuple(
        (letter, yard.versions[version].reference, _version_level(version, letters))
        for version, letter in letters.items()
    )
    return YardMap(regions, chosen, is_bars, named)


_YARDS: SharedRead[Yard] = SharedRead("fleet_cell", "models_registry_modelversion", "traffic_trafficrule")
_HOTTEST: SharedRead[Mapping[str, float]] = SharedRead("fleet_cellmember")


def yard_cells(now: datetime) -> Yard:
    """Live cells with their last load, oldest first. Two queries, or five after a change."""
    since = _whole(now, FINE_S) - FRESH
    return _YARDS.get((last_sample_at(FLEET), since), lambda: _load_yard(since))


def _whole(now: datetime, step_s: int) -> datetime:
    """The begin of this step. Windows begin on whole steps, so the recent ones are the same during a step."""
    return datetime.fromtimestamp(now.timestamp() // step_s * step_s, UTC)


def _load_yard(since: datetime) -> Yard:
    with connection.cursor() as cursor:
        cursor.execute(_CELLS, {"step_s": FINE_S, "since": since})
        cells = tuple(YardCell(*row) for row in cursor.fetchall())
    versions = ModelVersion.objects.in_bulk({cell.version for cell in cells})
    tested = _tested(cells, versions)
    ready = [tested.get(cell.id, 0) for cell in cells if cell.state == CellState.READY]
    return Yard(cells, versions, tested, sum(ready) / len(ready) if ready else 0.0)


def _tested(cells: Iterable[YardCell], versions: Mapping[int, ModelVersion]) -> dict[str, int]:
    policies = traffic_policies()
    of_types = {pk: concurrency_by_type(version) for pk, version in versions.items()}
    of_roles = {pk: role_concurrency(version.roles) for pk, version in versions.items()}
    found = {}
    for cell in cells:
        if cell.role != CellRole.PREFILL:
            policy, version = policies.get(cell.deployment), versions[cell.version]
            own = of_roles[cell.version].get(cell.role, version.max_concurrency)
            stated = policy.tested_on(cell.instance_type) if policy else None
            found[cell.id] = stated or of_types[cell.version].get((cell.instance_type, cell.role), own)
    return found


def _painter(
    shade: Shade, placed: Sequence[Placed], yard: Yard, letters: Mapping[int, str], now: datetime
) -> tuple[object, Paint]:
    """How a cell is filled, and all that this depends on besides the yard."""
    if shade is Shade.LOAD:
        return None, lambda cell: _fill_share(cell.requests, yard.tested.get(cell.id))
    if shade is Shade.TTFT:
        objectives = {deployment.name: deployment.objective().ttft_ms for deployment, _ in placed}
        return tuple(objectives.items()), lambda cell: _fill_ttft(cell.ttft_ms, objectives.get(cell.deployment))
    if shade is Shade.KV_CACHE:
        return None, lambda cell: _fill_kv(cell.kv_percent)
    if shade is Shade.TEMPERATURE:
        since = _whole(now, MINUTE_S) - FRESH_OF_NODES
        key = (last_sample_at(FLEET, NodeWindow), since)
        hottest = _HOTTEST.get(key, lambda: _temperatures(since))
        return key, lambda cell: _fill_temperature(hottest.get(cell.id))
    if shade is Shade.COST:
        prices = _cell_prices(yard, now)
        dearest = max((price for price in prices.values() if price), default=0.0)
        return frozenset(prices.items()), lambda cell: _fill_cost(prices[_priced(cell)], dearest)
    return None, lambda cell: Fill(
        None,
        yard.versions[cell.version].reference,
        level=_version_level(cell.version, letters),
        letter=letters.get(cell.version, "?"),
    )


def _version_level(version: int, letters: Mapping[int, str]) -> int:
    """Spreads the versions over all levels, in the order of their letters."""
    place = LETTERS.find(letters.get(version, "?")) + 1
    return LEVELS * place // max(1, len(letters))


def _fill_share(requests: float | None, tested: int | None) -> Fill:
    if requests is None or not tested:
        return Fill(None, NOTHING)
    used = requests / tested
    return Fill(used, share(100 * used), _level(used), is_over=used > 1)


def _fill_ttft(measured_ms: float | None, objective_ms: float | None) -> Fill:
    if measured_ms is None or not objective_ms:
        return Fill(measured_ms, ms(measured_ms))
    return Fill(measured_ms, ms(measured_ms), _level(measured_ms / objective_ms), is_over=measured_ms > objective_ms)


def _fill_kv(percent: float | None) -> Fill:
    return Fill(percent, share(percent), _level((percent or 0.0) / 100))


def _fill_temperature(celsius: float | None) -> Fill:
    return Fill(celsius, NOTHING if celsius is None else f"{celsius:.0f} °C", _level((celsius or 0.0) / 100))


def _fill_cost(price: float | None, dearest: float) -> Fill:
    return Fill(price, NOTHING if price is None else f"${price:,.2f}/h", _level(price / dearest) if price else 0)


def _level(part: float) -> int:
    return max(0, min(LEVELS, ceil(part * LEVELS)))


def _priced(cell: YardCell) -> tuple[str, str, int]:
    return cell.region, cell.instance_type, cell.version


def _temperatures(since: datetime) -> dict[str, float]:
    """Cell -> degrees Celsius of its hottest device. One query."""
    with connection.cursor() as cursor:
        cursor.execute(_TEMPERATURES, {"step_s": MINUTE_S, "since": since})
        return dict(cursor.fetchall())


def _cell_prices(yard: Yard, now: datetime) -> dict[tuple[str, str, int], float | None]:
    """US dollars an hour by region, instance type and version; None if unknown. Three queries."""
    prices, found = machine_prices(), dict[tuple[str, str, int], float | None]()
    for region, kind, version in {_priced(cell) for cell in yard.cells}:
        try:
            nodes = nodes_per_cell(yard.versions[version].spec(), kind)
        except InvalidVersion:
            nodes = 0
        usd = prices.of(region, kind, now).usd
        found[region, kind, version] = usd * nodes if usd is not None and nodes else None
    return found


def _letters(yard: Yard) -> dict[int, str]:
    """Version -> letter, for the most frequent versions, in the order of their names."""
    common = [version for version, _ in Counter(cell.version for cell in yard.cells).most_common(len(LETTERS))]
    ordered = sorted(common, key=lambda version: yard.versions[version].reference)
    return dict(zip(ordered, LETTERS, strict=False))


def _line(deployment: str, there: RegionCells, place: PaintedPlace, is_bars: bool) -> YardLine:
    return YardLine(
        deployment=deployment,
        share=there,
        tiles=() if is_bars else place.tiles,
        segments=_segments(place, there.wanted) if is_bars else (),
        states=tuple(
            (state.value, CELL_TONE[state], there.states[state.value])
            for state in CellState
            if there.states.get(state.value)
        ),
        text=place.worst.fill.text if place.worst else NOTHING,
        worst=place.worst,
    )


_TONES = (Tone.OK, Tone.WARN, Tone.MOVING, Tone.BAD, Tone.IDLE)


def _segments(place: PaintedPlace, wanted: int) -> tuple[Segment, ...]:
    """Ready cells by fill first, so that bars can be compared; then those over their limit, moving and broken ones."""
    whole, start, segments = max(1, len(place.tiles), wanted), 0.0, []
    for tone, level, cells in place.fills:
        width = 100.0 * cells / whole
        segments.append(Segment(_TONES[tone], level, round(start, 2), round(width, 2)))
        start += width
    return tuple(segments)
