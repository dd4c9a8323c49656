"""Words and evidence for what went wrong on a node, for reports and fault messages. It sends nothing."""

import signal

from engine_agent.planning.node import Membership
from engine_agent.protocol.messages import Fault, JsonObject
from engine_agent.runtime.processes import ProcessEnd


def describe_end(end: ProcessEnd, lines: list[str]) -> str:
    """An end in words, with the last line of the log. Who is killed writes nothing of it: that line is older news."""
    return f"{end}: {lines[-1]}" if lines and end.code != -signal.SIGKILL else str(end)


def ended(end: ProcessEnd, reason: str, lines: list[str]) -> Fault:
    """Evidence of a process that ended by itself; `reason` is what the node says of it."""
    record = end.record
    evidence: JsonObject = {
        **_whose(record.membership),
        "pid": record.pid,
        "exit_code": end.code,
        "ran_s": round(end.ran_s, 3),
        "last_log_lines": lines,
    }
    return Fault(signature=f"{end.kind}_ended", summary=reason, evidence=evidence)


def given_up(member: Membership, reason: str, lines: list[str]) -> Fault:
    """Evidence of an engine that could not be started or was not ready in time."""
    return Fault("engine_not_started", reason, {**_whose(member), "last_log_lines": lines})


def _whose(member: Membership) -> JsonObject:
    return {"cell": member.cell, "generation": member.generation, "rank": member.rank}
