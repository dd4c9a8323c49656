"""Error budgets burn at a rate; an alarm needs a long window and a short one."""

import pytest

from engine_agent.protocol.states import ServingClass
from fleet.planning.load.slo import WINDOWS_S, InvalidObjective, Objective, RequestCounts, burns, parse_objective
from kernel.tones import Tone

OBJECTIVE = Objective(availability=0.99, ttft_ms=1000.0, ttft_share=0.95)


def seen(errors: int = 0, slow: int = 0, **by_window: RequestCounts) -> dict[int, RequestCounts]:
    own = {int(name[1:]): what for name, what in by_window.items()}
    return {window: own.get(window, RequestCounts(1000, errors, slow)) for window in WINDOWS_S}


def test_a_rate_of_one_uses_up_the_budget_just_in_time() -> None:
    available, quick = burns(OBJECTIVE, seen(errors=10, slow=0))
    assert available.rates[3600] == pytest.approx(1.0)
    assert available.tone is Tone.OK
    assert quick.rates[3600] == 0.0


def test_fast_burn_in_both_windows_is_bad() -> None:
    available, _ = burns(OBJECTIVE, seen(errors=200))
    assert available.tone is Tone.BAD
    assert available.reason == "burns 20.0 times too fast over the last hour and still does"


def test_what_is_over_is_no_alarm() -> None:
    calm = RequestCounts(1000)
    available, _ = burns(OBJECTIVE, seen(errors=200, _300=calm, _1800=calm, _21600=calm))
    assert available.tone is Tone.OK


def test_late_first_tokens_burn_a_budget_of_their_own() -> None:
    _, quick = burns(OBJECTIVE, seen(slow=800))
    assert quick.tone is Tone.BAD
    assert quick.rates[300] == pytest.approx(16.0)


def test_without_requests_nothing_is_judged() -> None:
    available, quick = burns(OBJECTIVE, dict.fromkeys(WINDOWS_S, RequestCounts()))
    assert (available.tone, quick.tone, available.rates[300]) == (Tone.IDLE, Tone.IDLE, None)


def test_what_is_not_stated_comes_from_the_serving_class() -> None:
    assert parse_objective({"availability": 0.9}, ServingClass.BATCH) == Objective(0.9, 600_000.0, 0.95)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"uptime": 1}, "there is no objective 'uptime'; there are: availability, ttft_ms, ttft_share"),
        ({"availability": 1.0}, "availability is 1.0; it must be a number from 0.5 to 0.99999"),
        ({"ttft_ms": True}, "ttft_ms is True; it must be a number from 1 to 3.6e\\+06"),
    ],
)
def test_a_bad_objective_is_named(stated: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidObjective, match=message):
        parse_objective(stated, ServingClass.REALTIME)
