"""Reads energy counters every few seconds: of NVIDIA devices and of processors (RAPL), and the power shares that Neuron
devices report. It opens no device; machines without counters have no meters."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Protocol

from engine_agent.node.planning.energy import MeterState, Reading, advance
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor
from engine_agent.node.telemetry.nvidia import NvidiaReader
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.telemetry_messages import EnergyMeter

log = logging.getLogger(__name__)

READ_EVERY_S = 5.0
ACCELERATORS, HOST = "accelerators", "host"
RAPL = Path("sys/class/powercap")
"""https://docs.kernel.org/power/powercap/powercap.html; only root may read its counters, because they reveal
secrets."""
RAPL_MOST_WATTS = 1_000.0
"""Of a package that states no limit."""
NEURON = Path("sys/devices/virtual/neuron_device")
"""https://awsdocs-neuron.readthedocs-hosted.com, "Neuron Sysfs User Guide": `stats/power/utilization` of each device
has `status,timestamp,min,max,avg` of the last minute, in per cent of the maximum power."""
POWER_IS_VALID = "POWER_STATUS_VALID"
NEURON_STALE_AFTER_S = 180.0
"""The driver writes a line each minute."""


class EnergySource(Protocol):
    """One kind of counters on this machine. `covers`: the part of the machine that they measure completely."""

    name: str
    covers: str

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        """The readings by device, and their time (monotonic seconds); None without readings. It never blocks for
        long."""


class EnergyMonitor:
    """The meters of a machine, one per part. Of two sources for one part, the first one with readings counts."""

    def __init__(
        self, sources: Sequence[EnergySource], new_life: Callable[[], str] = lambda: secrets.token_hex(8)
    ) -> None:
        self._sources = sources
        self._new_life = new_life
        self._states: dict[str, MeterState] = {}

    def meters(self) -> tuple[EnergyMeter, ...]:
        return tuple(self._states[covers].meter for covers in sorted(self._states))

    async def run_once(self) -> None:
        if not self._sources:
            await asyncio.Event().wait()
        self.read()
        await asyncio.sleep(READ_EVERY_S)

    def read(self) -> None:
        for source in self._sources:
            reading = source.read()
            if reading is not None:
                self._add(source, *reading)

    def _add(self, source: EnergySource, at_s: float, readings: Mapping[str, Reading]) -> None:
        state, at_ms = self._states.get(source.covers), round(at_s * 1000)
        if state is None:
            log.info("energy of %s is read from %s: %s", source.covers, source.name, ", ".join(sorted(readings)))
            self._states[source.covers] = MeterState.begin(
                source.name, source.covers, self._new_life(), readings, at_ms
            )
        elif state.meter.name == source.name:
            after = advance(state, readings, at_ms)
            if after.meter.refused > state.meter.refused:
                log.warning("energy of %s: an implausible reading of %s", source.covers, source.name)
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
    """Processors' packages and their memory, as far as this user may read them. `root` replaces `/`."""

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
    """Packages, and memory outside them. The zone of the whole platform contains both and is left out."""
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):
        name = _file_text(zone / "name")
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
    name = "neuron"
    covers = ACCELERATORS

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = monotonic) -> None:
        self._files = sorted((root / NEURON).glob("neuron*/stats/power/utilization"))
        self._clock = clock
        self._last_lines: dict[Path, tuple[str, float]] = {}
        """The last content of each file, and since when."""

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        at_s = self._clock()
        readings = {file.parents[2].name: self._reading(file, at_s) for file in self._files}
        return (at_s, readings) if any(reading.share is not None for reading in readings.values()) else None

    def _reading(self, file: Path, at_s: float) -> Reading:
        text = _file_text(file)
        before = self._last_lines.get(file)
        if before is None or before[0] != text:
            self._last_lines[file] = before = (text, at_s)
        is_stale = at_s - before[1] > NEURON_STALE_AFTER_S
        return Reading(share=None if is_stale else parse_power_share(text))


def parse_power_share(text: str) -> float | None:
    """The average of the last minute as a share of the maximum, or None."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 5 or parts[0] != POWER_IS_VALID:
        return None
    try:
        percent = float(parts[4].removesuffix("%"))
    except ValueError:
        return None
    return percent / 100 if 0 <= percent <= 200 else None


class OwnDevicesSource:
    """Another source's readings of the devices that a node owns; None unless all of them are there. A shared device's
    energy is divided by the nodes' shares of it, so that their sum is never more than what was measured."""

    def __init__(self, machine: EnergySource, accelerators: AcceleratorMonitor, owns: NodeResources) -> None:
        self.name, self.covers = machine.name, machine.covers
        self._machine, self._accelerators, self._owns = machine, accelerators, owns

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        found = self._machine.read()
        if found is None:
            return None
        names = {f"{device.kind}{device.index}" for device in self._accelerators.devices()}
        own = {name: self._part(reading) for name, reading in found[1].items() if name in names}
        return (found[0], own) if len(own) == len(self._owns.devices) else None

    def _part(self, reading: Reading) -> Reading:
        if self._owns.share == 1.0 or reading.microjoules is None:
            return reading
        part = int(reading.microjoules * self._owns.share)
        return replace(reading, microjoules=part, most_watts=reading.most_watts * self._owns.share)


def energy_here(accelerators: AcceleratorMonitor, root: Path = Path("/")) -> EnergyMonitor:
    """The meters of this machine, or of a node's devices. Nodes that share a host have no meter of the host, because
    its energy would count once for each. `root` replaces `/`."""
    sources: list[EnergySource] = [
        NvidiaSource(reader) for reader in accelerators.readers if isinstance(reader, NvidiaReader)
    ]
    sources += [source for source in (NeuronPowerSource(root), RaplSource(root)) if source.read() is not None]
    if (owns := accelerators.owns) is not None:
        of_devices = [source for source in sources if source.covers == ACCELERATORS]
        sources = [OwnDevicesSource(source, accelerators, owns) for source in of_devices]
    return EnergyMonitor(sources)


def _file_text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()[:200].strip()
    return ""


def _number(path: Path) -> int | None:
    text = _file_text(path)
    return int(text) if text.isascii() and text.isdecimal() else None
