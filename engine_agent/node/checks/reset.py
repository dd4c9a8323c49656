"""Resets a node's accelerators before its deep checks, as a rung of a repair. NVIDIA: `nvidia-smi --gpu-reset`, which
the driver refuses while any program has the GPU open, and for which it needs root. Neuron: the driver is reloaded,
which resets all devices of the machine, so only a node that owns the whole machine may do it. MIG instances cannot be
reset: that would end the other instances of their GPU. Sources: `nvidia-smi -h` (GPU reset), and "Solution" of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/nrt-troubleshoot.html (rmmod, modprobe)."""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Sequence

from engine_agent.node.checks.result import Result
from engine_agent.protocol.machine_messages import gpu_index
from engine_agent.protocol.telemetry_messages import Accelerator

CHECK = "reset"
LIMIT_S = 120.0
SYSTEM_PATH = "/usr/bin:/usr/sbin:/bin:/sbin"
"""Services often have no folders of system programs on their PATH."""
NVIDIA, NEURON = "nvidia", "neuron"
WANTED = "the driver resets the device"
Run = Callable[[Sequence[str]], Awaitable[str]]
"""Runs a program; returns "" if it succeeded, else its last line of output."""


async def reset_devices(
    named: Sequence[str], own: Sequence[Accelerator], machine: Sequence[Accelerator], run: Run | None = None
) -> Result:
    """Resets the node's `own` devices that are `named`, by UUID or as `neuron 3`; all of them if none is. `machine`:
    all devices of the machine."""
    chosen = [device for device in own if not named or _names(device) & set(named)]
    if not chosen:
        return Result(CHECK, False, f"the node has no device {', '.join(named)}".rstrip(), WANTED)
    if any(device.uuid.startswith("MIG-") for device in chosen):
        return Result(CHECK, False, "a MIG instance cannot be reset without the others of its GPU", WANTED)
    run = run or _run
    if chosen[0].kind == NEURON:
        return await _reload_neuron(own, machine, run)
    for device in chosen:
        if error := await run(["nvidia-smi", "--gpu-reset", "-i", device.uuid or str(device.index)]):
            return Result(CHECK, False, f"{device.kind} {device.index}: {error}", WANTED)
    return Result(CHECK, True, f"reset {', '.join(f'{device.kind} {device.index}' for device in chosen)}")


def _names(device: Accelerator) -> set[str]:
    """A fault of a GPU is one of its MIG instances."""
    return {device.uuid, f"{device.kind} {device.index}", f"{device.kind} {gpu_index(device.index)}"}


async def _reload_neuron(own: Sequence[Accelerator], machine: Sequence[Accelerator], run: Run) -> Result:
    if len(own) < len(machine):
        found = f"the node owns {len(own)} of {len(machine)} devices, and a reload of the driver resets all of them"
        return Result(CHECK, False, found, WANTED)
    for argv in (["modprobe", "--remove", NEURON], ["modprobe", NEURON]):
        if error := await run(argv):
            return Result(CHECK, False, f"{' '.join(argv)}: {error}", WANTED)
    return Result(CHECK, True, f"reloaded the driver of {len(own)} devices")


async def _run(argv: Sequence[str]) -> str:
    """See `Run`."""
    program = shutil.which(argv[0]) or shutil.which(argv[0], path=SYSTEM_PATH)
    if program is None:
        return f"{argv[0]} is not installed"
    process = await asyncio.create_subprocess_exec(
        program, *argv[1:], stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return f"no end within {LIMIT_S:.0f} s"
    lines = output.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else (lines[-1][:200] if lines else f"status {process.returncode}")
