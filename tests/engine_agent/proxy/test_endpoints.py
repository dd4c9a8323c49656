"""What HAProxy's agent-check is told, as a table."""

import pytest

from engine_agent.protocol.states import Phase
from engine_agent.proxy.endpoints import agent_check_line


@pytest.mark.parametrize(
    ("phase", "healthy", "reason", "line"),
    [
        (Phase.SERVE, True, "", b"up 100%\n"),
        (Phase.DRAIN, True, "", b"drain\n"),
        (Phase.STOP, True, "", b"drain\n"),
        (Phase.SERVE, False, "follower 1 lost", b"down #follower 1 lost\n"),
        (Phase.DRAIN, False, "refused", b"down #refused\n"),
        (Phase.SERVE, False, "a\nb,ready;  maint\x00 é", b"down #a b ready maint\n"),
        (Phase.SERVE, False, "x" * 500, b"down #" + b"x" * 100 + b"\n"),
        (Phase.SERVE, False, "\n", b"down #unknown\n"),
    ],
)
def test_agent_check_line(phase: Phase, healthy: bool, reason: str, line: bytes) -> None:
    assert agent_check_line(phase=phase, healthy=healthy, reason=reason) == line
