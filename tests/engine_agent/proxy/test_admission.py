"""Who is admitted, as a table."""

import pytest

from engine_agent.protocol.states import Phase
from engine_agent.proxy.admission import refuse


@pytest.mark.parametrize(
    ("phase", "healthy", "in_flight", "code"),
    [
        (Phase.SERVE, True, 0, None),
        (Phase.SERVE, True, 4, None),
        (Phase.SERVE, True, 7, None),
        (Phase.SERVE, True, 8, "cell_saturated"),
        (Phase.SERVE, False, 0, "engine_unhealthy"),
        (Phase.SERVE, False, 8, "engine_unhealthy"),
        (Phase.DRAIN, True, 0, "cell_draining"),
        (Phase.DRAIN, False, 0, "cell_draining"),
        (Phase.STOP, True, 0, "cell_draining"),
    ],
)
def test_admission(phase: Phase, healthy: bool, in_flight: int, code: str | None) -> None:
    refusal = refuse(phase=phase, healthy=healthy, reason="gone", in_flight=in_flight, max_concurrency=4)
    assert (refusal.code if refusal else None) == code
    assert refusal is None or (refusal.status, refusal.retry) == (503, True)
