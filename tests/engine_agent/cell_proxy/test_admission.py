import pytest

from engine_agent.cell_proxy.admission import limit_of, refuse, refuse_deadline
from engine_agent.protocol.states import Phase, ServingClass

REALTIME, NEAR, BATCH = ServingClass


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
    refusal = refuse(REALTIME, phase=phase, healthy=healthy, reason="gone", in_flight=in_flight, limit=8)
    assert (refusal.code if refusal else None) == code
    assert refusal is None or (refusal.status, refusal.retry) == (503, True)


@pytest.mark.parametrize(
    ("serving_class", "max_concurrency", "urgent_lately", "limit"),
    [
        (REALTIME, 64, True, 128),
        (REALTIME, 64, False, 128),
        (NEAR, 64, True, 57),
        (NEAR, 64, False, 96),
        (BATCH, 64, True, 48),
        (BATCH, 64, False, 96),
        (BATCH, 4, True, 3),
        (NEAR, 4, True, 3),
        (BATCH, 2, True, 1),
        (BATCH, 1, True, 1),
        (BATCH, 1, False, 2),
    ],
)
def test_slots_are_closed_to_the_less_urgent_while_the_urgent_come(
    serving_class: ServingClass, max_concurrency: int, urgent_lately: bool, limit: int
) -> None:
    assert limit_of(serving_class, max_concurrency=max_concurrency, urgent_lately=urgent_lately) == limit


def test_however_much_batch_work_there_is_a_real_time_request_finds_a_slot() -> None:
    for max_concurrency in range(2, 300):
        urgent = limit_of(REALTIME, max_concurrency=max_concurrency, urgent_lately=False)
        for urgent_lately, most in ((True, max_concurrency), (False, urgent)):
            near = limit_of(NEAR, max_concurrency=max_concurrency, urgent_lately=urgent_lately)
            batch = limit_of(BATCH, max_concurrency=max_concurrency, urgent_lately=urgent_lately)
            assert 1 <= batch <= near < most, f"{max_concurrency=} {urgent_lately=}"


@pytest.mark.parametrize(
    ("time_left_s", "ttft_p50_s", "samples", "code"),
    [
        (1.0, None, 0, None),
        (1.0, 0.5, 100, None),
        (1.0, 1.5, 100, "deadline_unreachable"),
        (1.0, 1.5, 19, None),
        (0.0, None, 0, "deadline_exceeded"),
        (-2.0, 0.1, 100, "deadline_exceeded"),
    ],
)
def test_what_cannot_be_in_time_is_not_begun(
    time_left_s: float, ttft_p50_s: float | None, samples: int, code: str | None
) -> None:
    refusal = refuse_deadline(time_left_s, ttft_p50_s=ttft_p50_s, samples=samples)
    assert (refusal.code if refusal else None) == code
