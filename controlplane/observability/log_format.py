"""The control plane's log lines: in which form, and with which numbers (engine_agent.protocol.log_lines)."""

from engine_agent.protocol.log_lines import JsonLines
from kernel.process_role import process_role
from kernel.tracing import request_id, trace_id


def json_lines() -> JsonLines:
    """Factory for Django's `LOGGING`."""
    return JsonLines(process_role().service, lambda: {"request_id": request_id(), "trace_id": trace_id()})
