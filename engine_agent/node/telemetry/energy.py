"""Reads what a machine says of its power every few seconds: counters of NVIDIA devices and of processors (RAPL), and
the shares of their power that Neuron devices tell. It opens no device and acts on nothing; where nothing is said it is
silent.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Protocol

from engine_agent.node.planning.energy import MeterState, Reading, advance
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor
from engine_agent.node.telemetry.nvidia import NvidiaReader
from engine_agent.protocol.messages import EnergyMeter

log = logging.getLogger(__name__)

READ_EVERY_S = 5.0
ACCELERATORS, HOST = "accelerators", "host"
RAPL = Path("sys/class/powercap")
"""https://docs.kernel.org/power/powercap/powercap.html; only root may read its counters, since they tell of secrets."""
RAPL_MOST_WATTS = 1_000.0
"""Of a package that states no limit of its own."""
NEURON = Path("sys/devices/virtual/neuron_device")
"""https://awsdocs-neuron.readthedocs-hosted.com, "Neuron Sysfs User Guide": `stats/power/utilization` of each device
has `status,timestamp,min,max,avg` of the last minute, in per cent of the most that it draws."""
POWER_IS_VALID = "POWER_STATUS_VALID"
NEURON_STALE_AFTER_S = 180.0
"""The driver writes a line each minute."""


class EnergySource(Protocol):
    """One kind of counters on this machine. `covers`: the part of the machine that they are all of."""

    name: str
    covers: str

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        """What they say, by device, and when (monotonic seconds); None: nothing now. It never blocks for long."""


class EnergyMonitor:
    """The meters of a machine, one for each part of it: of two sources that cover one, the first that says anything."""

    def __init__(
        self, sources: Sequence[EnergySource], new_life: Callable[[], str] = lambda: secrets.token_hex(8)
    ) -> None:
        self._sources = sources
        self._new_life = new_life
        self._states: dict[str, MeterState] = {}

    def meters(self) -> tuple[EnergyMeter, ...]:
        return tuple(self._states[covers].meter for covers in sorted(self._states))

    async def run_once(self) -> None:
        """Read, and wait for the next time; for ever where there is nothing to read."""
        if not self._sources:
            await asyncio.Event().wait()
        self.read()
        await asyncio.sleep(READ_EVERY_S)

    def read(self) -> None:
        """Take in what all sources say now."""
        for source in self._sources:
            said = source.read()
            if said is not None:
                self._take(source, *said)

    def _take(self, source: EnergySource, at_s: float, readings: Mapping[str, Reading]) -> None:
        state, at_ms = self._states.get(source.covers), round(at_s * 1000)
        if state is None:
            log.info("energy of %s is read from %s: %s", source.covers, source.name, ", ".join(sorted(readings)))
            self._states[source.covers] = MeterState.begin(
                source.name, source.covers, self._new_life(), readings, at_ms
            )
        elif state.meter.name == source.name:
            after = advance(state, readings, at_ms)
            if after.meter.refused > state.meter.refused:
                log.warning("energy of %s: a reading of %s cannot be so", source.covers, source.name)
            self._states[source.covers] = after


class NvidiaSource:
    """All NVIDIA devices of this machine, as their reader last read them."""

    name = "nvidia"
    covers = ACCELERATORS

    def __init__(self, reader: NvidiaReader) -> None:
        self._reader = reader

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        return self._reader.energy


class RaplSource:
    """Processors' packages and their memory, as far as this user may read them. `root` is where `/` is."""

    name = "rapl"
    covers = HOST

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = monotonic) -> None:
        self._zones = _rapl_zones(root / RAPL)
        self._clock = clock

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        at_s = self._clock()
        readings = {zone.name: reading for zone in self._zones if (reading := _rapl_reading(zone)) is not None}
        return (at_s, readings) if readings else None


def _rapl_zones(root: Path) -> list[Path]:
    """Packages, and the memory that is apart from them. The zone of the whole platform holds both, and is left out."""
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):
        name = _text(zone / "name")
        is_package = zone.name.count(":") == 1 and name.startswith("package")
        if is_package or (zone.name.count(":") == 2 and name == "dram"):
            found.append(zone)
    return found


def _rapl_reading(zone: Path) -> Reading | None:
    counter, wraps_at = _number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")
    if counter is None:
        return None
    most_uw = _number(zone / "constraint_0_max_power_uw")
    return Reading(
        microjoules=counter,
        most_watts=most_uw / 1_000_000 if most_uw else RAPL_MOST_WATTS,
        wraps_at=wraps_at or None,
    )


class NeuronPowerSource:
    """All Neuron devices of this machine."""

    name = "neuron"
    covers = ACCELERATORS

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = monotonic) -> None:
        self._files = sorted((root / NEURON).glob("neuron*/stats/power/utilization"))
        self._clock = clock
        self._said: dict[Path, tuple[str, float]] = {}
        """What each file said, and since when it has said so."""

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        at_s = self._clock()
        readings = {file.parents[2].name: self._reading(file, at_s) for file in self._files}
        return (at_s, readings) if any(reading.share is not None for reading in readings.values()) else None

    def _reading(self, file: Path, at_s: float) -> Reading:
        text = _text(file)
        before = self._said.get(file)
        if before is None or before[0] != text:
            self._said[file] = before = (text, at_s)
        is_stale = at_s - before[1] > NEURON_STALE_AFTER_S
        return Reading(share=None if is_stale else parse_power_share(text))


def parse_power_share(text: str) -> float | None:
    """The average of the last minute as a share of the most; None: the driver does not say it."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 5 or parts[0] != POWER_IS_VALID:
        return None
    try:
        percent = float(parts[4].removesuffix("%"))
    except ValueError:
        return None
    return percent / 100 if 0 <= percent <= 200 else None


def energy_here(accelerators: AcceleratorMonitor, root: Path = Path("/")) -> EnergyMonitor:
    """The meters of this machine. `root` is where `/` is."""
    sources: list[EnergySource] = [
        NvidiaSource(reader) for reader in accelerators.readers if isinstance(reader, NvidiaReader)
    ]
    sources += [source for source in (NeuronPowerSource(root), RaplSource(root)) if source.read() is not None]
    return EnergyMonitor(sources)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()[:200].strip()
    return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdecimal() else None
