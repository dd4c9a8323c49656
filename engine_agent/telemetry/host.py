"""The machine as the operating system describes it: what it has, and what is in use. It reads and never acts."""

import os

import psutil

from engine_agent.protocol.messages import Inventory, NodeTelemetry


def read_inventory(instance_type: str, address: str, port_base: int) -> Inventory:
    """What the machine has: cores that this process may use and memory in bytes."""
    return Inventory(
        instance_type=instance_type,
        address=address,
        port_base=port_base,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
    )


def read_usage(engine_pid: int | None) -> NodeTelemetry:
    """Use of the machine since the last call (CPU) and now (memory), of the agent and of the engine's main process."""
    memory = psutil.virtual_memory()
    return NodeTelemetry(
        host_cpu_percent=psutil.cpu_percent(interval=None),
        host_memory_used_bytes=memory.total - memory.available,
        agent_rss_bytes=_rss_bytes(os.getpid()),
        engine_rss_bytes=_rss_bytes(engine_pid) if engine_pid is not None else None,
    )


def _rss_bytes(pid: int) -> int | None:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None
