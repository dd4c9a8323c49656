"""Rules about faults over HTTP."""

import pytest

from fleet.models import FaultRule
from kernel.models import Event
from tests.controlplane.api.client import bearer

pytestmark = pytest.mark.django_db


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["hard_signature", "silence", "slow", "repeated_repairs"])
def test_a_rule_is_in_force_as_it_comes(rule: str) -> None:
    shown = bearer().get(f"/api/v1/fault-rules/{rule}").json()
    assert shown == {"rule": rule, "mode": "on", "actor": "", "changed_at": None}
    assert bearer().get("/api/v1/fault-rules").json()["results"] == []


def test_an_operator_puts_a_rule_into_shadow() -> None:
    answer = bearer().patch("/api/v1/fault-rules/slow", {"mode": "shadow", "why": "new"}, format="json")
    assert (answer.status_code, answer.json()["mode"]) == (200, "shadow")
    assert FaultRule.objects.get().rule == "slow"
    assert [rule["mode"] for rule in bearer().get("/api/v1/fault-rules").json()["results"]] == ["shadow"]
    assert "rule slow: on -> shadow by" in Event.objects.get().message
    bearer().patch("/api/v1/fault-rules/slow", {"mode": "shadow"}, format="json")
    assert Event.objects.count() == 1


def test_what_is_no_rule_or_no_mode_is_refused() -> None:
    assert bearer().get("/api/v1/fault-rules/operator").status_code == 404
    assert bearer().patch("/api/v1/fault-rules/slow", {"mode": "maybe"}, format="json").status_code == 400
    assert bearer().patch("/api/v1/fault-rules/slow", {"mod": "on"}, format="json").status_code == 400
