"""What the suite's tests had the control plane call, against what its policies allow: each call is allowed, and what is
allowed was called. Runs after all others on the cloud, in the process that ran them."""

from pathlib import Path

import pytest

from bench.cloud.wire import NOT_IN_THIS_CLOUD
from fleet.providers.aws.actions import CALLS, Role
from tests.aws_calls_made import UNANSWERED, made
from tests.deploy.aws.conftest import Deployed
from tests.deploy.aws.test_policies import as_list, statements
from tests.layers import ROOT, marks_of

pytestmark = [pytest.mark.cloud, pytest.mark.last]

NOT_BY_A_CALL = {"iam:PassRole", "ec2:CreateTags"}
"""EC2 asks for these while it carries out a RunInstances, which the table says."""
NOTHING = {NOT_IN_THIS_CLOUD, UNANSWERED, "ParamValidation"}
"""What proves no call."""


def called() -> set[tuple[str, str]]:
    return {call for call, codes in made.items() if codes - NOTHING}


def whole_layer_ran(request: pytest.FixtureRequest) -> bool:
    """Every file on the cloud, and all of each."""
    there = {path for path in (ROOT / "tests").rglob("test_*.py") if "cloud" in marks_of(path)}
    ran = {Path(item.path) for item in request.session.items}
    asked = request.config.option
    chosen = asked.keyword or asked.markexpr or any("::" in argument for argument in request.config.args)
    return there <= ran and not chosen


def test_what_was_called_is_allowed(deployed: Deployed) -> None:
    allowed = {action for each in statements(deployed, "control") for action in as_list(each["Action"])}
    for service, operation in called():
        call = CALLS.get((Role.CONTROL, service, operation))
        assert call is not None, f"{service} {operation} is called, and is not in the table"
        assert set(call.actions) <= allowed


def test_what_is_allowed_was_called(deployed: Deployed, request: pytest.FixtureRequest) -> None:
    if not whole_layer_ran(request):
        pytest.skip("only some tests on the cloud run")
    allowed = {action for each in statements(deployed, "control") for action in as_list(each["Action"])}
    of_calls = {call: CALLS[Role.CONTROL, *call].actions for call in called()}

    used = {action for actions in of_calls.values() for action in actions}
    assert allowed - used - NOT_BY_A_CALL == set()
    table = {(call.service, call.operation) for call in CALLS.values() if call.role is Role.CONTROL}
    assert table - set(of_calls) == set()
