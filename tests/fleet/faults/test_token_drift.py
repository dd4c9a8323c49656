"""Token counts that leaders report open and close incidents."""

from typing import Any

import msgspec
import pytest

from engine_agent.protocol.load_messages import Load, TokenCheck
from fleet.faults.models import Incident
from fleet.faults.planning.drift import TOKENS_DRIFT
from fleet.faults.selectors.faults import FRESH_FOR
from fleet.faults.services.watch import token_drift_check
from fleet.nodes.models import NodeReport
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def says(node: str, check: TokenCheck | None, **more: Any) -> None:
    load = msgspec.to_builtins(Load(token_check=check))
    NodeReport.objects.filter(node=node).update(load=load, **{"cell": "c", "last_seen_at": NOW, **more})


def opened() -> list[tuple[str, str]]:
    return list(Incident.objects.filter(kind=TOKENS_DRIFT, state="open").values_list("subject", "cell"))


def test_a_cell_that_counts_otherwise_has_an_incident_until_it_counts_the_same() -> None:
    rows.cell("c", rows.node("n-a"))
    says("n-a", TokenCheck(1.0, 5000, 5000, 3000, 5000))
    for _ in range(2):
        token_drift_check(now=NOW)
    assert opened() == [("c", "c")]
    incident = Incident.objects.get(kind=TOKENS_DRIFT)
    assert incident.evidence["engine_prompt_tokens"] == 5000
    assert incident.deployment == "sim-70b"
    says("n-a", None)
    token_drift_check(now=NOW)
    assert opened() == [("c", "c")], "it says nothing now"
    says("n-a", TokenCheck(9.0, 50, 50, 50, 50))
    token_drift_check(now=NOW)
    assert opened() == []


def test_neither_an_old_report_nor_one_of_another_cell_or_of_a_follower_opens_one() -> None:
    rows.cell("c", rows.node("n-a"), rows.node("n-b"))
    bad = TokenCheck(1.0, 5000, 5000, 0, 0)
    says("n-b", bad)
    says("n-a", bad, cell="other")
    token_drift_check(now=NOW)
    says("n-a", bad, last_seen_at=NOW - FRESH_FOR)
    token_drift_check(now=NOW)
    assert opened() == []


def test_what_cannot_be_meant_breaks_nothing() -> None:
    rows.cell("c", rows.node("n-a"))
    says("n-a", TokenCheck(1e300, 2**80, -5, 2**80, 0))
    token_drift_check(now=NOW)
    assert opened() == []
