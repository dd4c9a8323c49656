"""The control plane's log lines: in which form, and with which numbers (engine_agent.protocol.log_lines)."""

from controlplane.kernel.correlation import request_id
from controlplane.kernel.role import process_role
from controlplane.kernel.tracing import trace_id
from engine_agent.protocol.log_lines import JsonLines


def json_lines() -> JsonLines:
    """Factory for Django's `LOGGING`."""
    return JsonLines(process_role().service, lambda: {"request_id": request_id(), "trace_id": trace_id()})
