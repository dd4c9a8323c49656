"""An order carries the cause that a wake-up stated, once."""

from engine_agent.protocol.messages import Cause, Desired
from fleet.consumers.hub_state import PendingCauses

ORDER = Desired("n-1", 3, None)
HINT = {"type": "agent.desired", "nodes": ["n-1", "n-2"], "cause": {"request_id": "r-1", "traceparent": "00-a-b-01"}}


def test_the_next_order_carries_its_cause_and_the_one_after_does_not() -> None:
    causes = PendingCauses()
    causes.record(HINT)
    assert causes.attach("n-1", ORDER) == Desired("n-1", 3, None, cause=Cause("r-1", "00-a-b-01"))
    assert causes.attach("n-1", ORDER) == ORDER
    assert causes.attach("n-3", ORDER) == ORDER


def test_hints_without_a_cause_change_nothing() -> None:
    causes = PendingCauses()
    for hint in ({"type": "agent.table", "region": "eu"}, {**HINT, "cause": {}}, {**HINT, "cause": "x"}):
        causes.record(hint)
    assert causes.attach("n-1", ORDER) == ORDER
