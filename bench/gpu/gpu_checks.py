"""Deep checks and energy readings on a machine with an NVIDIA GPU.

    python3 -m bench gpu_checks [--seconds 15] [--write]

It runs `engine_agent deep-checks` with this Python, which needs torch with CUDA, and then multiplies matrices for so
many seconds while `engine_agent.node.telemetry` reads the device as an agent does. It compares the energy that our
meter counted with the sum of NVML's power samples. Needs torch, nvidia-ml-py and msgspec; takes 70 s. Prints
Markdown; `--write` puts it beside the other figures. Exit status 1 if anything is not as it should be.
"""

import argparse
import asyncio
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from bench.places import PAGES, ROOT
from engine_agent.node.checks.result import Result, result_from
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor
from engine_agent.node.telemetry.energy import EnergyMonitor, NvidiaSource
from engine_agent.node.telemetry.nvidia import NvidiaReader, load_library
from engine_agent.protocol.messages import EnergyMeter, Fault

SIDE = 8192
SAMPLE_S = 0.1
CHECKS_LIMIT_S = 240.0
IDLE_S = 5.0
WITHIN = 0.10
"""By how much a counter and a sum of samples may differ: NVML's power is an average of its own over up to a second."""


def deep_checks(seconds: float) -> tuple[list[Result], float, int]:
    """What the agent's command says, in how many seconds, and its exit status."""
    argv = [sys.executable, "-m", "engine_agent", "deep-checks", "--state", "/tmp", "--python", sys.executable]  # noqa: S108
    began_s = time.monotonic()
    done = subprocess.run(
        [*argv, "--seconds", f"{seconds:g}"], cwd=ROOT, capture_output=True, timeout=CHECKS_LIMIT_S, check=False
    )
    sys.stderr.write(done.stderr.decode(errors="replace"))
    return [result_from(line) for line in done.stdout.splitlines()], time.monotonic() - began_s, done.returncode


class Samples:
    """NVML's power, in a thread of its own."""

    def __init__(self, library: Any) -> None:
        self._library, self._stop = library, threading.Event()
        self.joules, self.seconds, self.most_watts = 0.0, 0.0, 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Samples":
        self._library.nvmlInit()
        self._devices = [
            self._library.nvmlDeviceGetHandleByIndex(index) for index in range(self._library.nvmlDeviceGetCount())
        ]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before_s, before = time.monotonic(), self._watts()
        while not self._stop.wait(SAMPLE_S):
            now_s, watts = time.monotonic(), self._watts()
            self.joules += (before + watts) / 2 * (now_s - before_s)
            self.seconds += now_s - before_s
            self.most_watts = max(self.most_watts, watts)
            before_s, before = now_s, watts

    def _watts(self) -> float:
        return sum(float(self._library.nvmlDeviceGetPowerUsage(device)) / 1000 for device in self._devices)


async def metered(seconds: float, work: Any) -> tuple[EnergyMeter, EnergyMeter, Samples, NvidiaReader, list[Fault]]:
    """Our meter before and after `work` was done in a thread for so long, and what else was seen meanwhile."""
    faults: list[Fault] = []
    library = load_library()
    library.nvmlInit()
    reader = NvidiaReader(faults.append, library.nvmlDeviceGetCount())
    monitor = AcceleratorMonitor([reader])
    await monitor.prepare()
    energy = EnergyMonitor([NvidiaSource(reader)])
    running = asyncio.ensure_future(monitor.run())
    first = await _next_meter(energy, reader)
    with Samples(library) as samples:
        await asyncio.to_thread(work, seconds)
        last = await _next_meter(energy, reader)
    running.cancel()
    return first, last, samples, reader, faults


async def _next_meter(energy: EnergyMonitor, reader: NvidiaReader) -> EnergyMeter:
    """The meter right after the reader's next reading."""
    before, ends_s = reader.energy, time.monotonic() + 20
    while reader.energy is before or reader.energy is None:
        if time.monotonic() > ends_s:
            raise SystemExit(f"no energy is read: {reader.trouble or 'the device does not count it'}")
        await asyncio.sleep(0.05)
    energy.read()
    (meter,) = energy.meters()
    return meter


def multiply(seconds: float) -> None:
    import torch

    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for _ in range(50):
            left @ right
        torch.cuda.synchronize()


def rest(seconds: float) -> None:
    time.sleep(seconds)


def energy_row(
    name: str, found: tuple[EnergyMeter, EnergyMeter, Samples, NvidiaReader, list[Fault]]
) -> tuple[str, bool]:
    """A line of the table, and whether both agree."""
    first, last, samples, _, _ = found
    joules = (last.microjoules - first.microjoules) / 1e6
    covered_s = (last.covered_ms - first.covered_ms) / 1e3
    ours, theirs = joules / max(covered_s, 1e-9), samples.joules / max(samples.seconds, 1e-9)
    differs = abs(ours - theirs) / theirs if theirs else 1.0
    figures = f"{covered_s:.1f} | {joules:.0f} | {ours:.1f} | {theirs:.1f} | {differs:.1%} | {samples.most_watts:.0f}"
    return f"| {name} | {figures} |", differs <= WITHIN and last.refused == 0


def report(results: Sequence[Result], took_s: float, status: int, seconds: float) -> tuple[list[str], bool]:
    """Lines of Markdown, and whether all is as it should be."""
    idle, busy = (asyncio.run(metered(each, work)) for each, work in ((IDLE_S, rest), (seconds, multiply)))
    rows, agree = zip(*(energy_row(name, found) for name, found in (("idle", idle), ("matmul", busy))), strict=True)
    reader, faults = busy[3], (*idle[4], *busy[4])
    marks = {True: "right", False: "WRONG", None: "not made"}
    lines = [
        "# Deep checks and energy on a GPU",
        "",
        f"`python3 -m bench gpu_checks --seconds {seconds:g}`, Python {platform.python_version()}.",
        "",
        *(
            f"- {device}, {device.utilisation_percent or 0:g} % used, counters {device.errors}"
            for device in reader.devices
        ),
        f"- trouble: {reader.trouble or 'none'}; faults reported: {', '.join(f.summary for f in faults) or 'none'}",
        "",
        f"`deep-checks` took {took_s:.1f} s and ended with {status}:",
        "",
        "| check | result | found | seconds |",
        "| --- | --- | --- | --- |",
        *(f"| {one.check} | {marks[one.ok]} | {one.found} | {one.seconds:.1f} |" for one in results),
        "",
        "| load | seconds | joules by our meter | watts by it | watts by samples of NVML | they differ | most watts |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    on_device = [one for one in results if "cuda" in one.check]
    return lines, status == 0 and len(on_device) >= 2 and all(agree) and not faults


def main(parser: argparse.ArgumentParser) -> int:
    """Measure; 1 if anything is not as it should be."""
    parser.add_argument("--seconds", type=float, default=15.0, help="of load")
    parser.add_argument("--write", action="store_true", help="write it beside the other figures")
    options = parser.parse_args()
    results, took_s, status = deep_checks(3.0)
    lines, is_right = report(results, took_s, status, options.seconds)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        (PAGES / "gpu_checks.md").write_text(text)
    return int(not is_right)
