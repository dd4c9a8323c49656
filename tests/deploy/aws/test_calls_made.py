"""What the suite's tests had the control plane call, against what its policies allow: each call is allowed, and what is
allowed was called. Runs after all others on the cloud, in the process that ran them."""

import pytest

from fleet.clouds.aws.actions import CALLS, Role
from lab.cloud.wire import NOT_IN_THIS_CLOUD
from tests.aws_calls_made import UNANSWERED, made
from tests.deploy.aws.conftest import Deployed
from tests.deploy.aws.test_policies import as_list, statements

pytestmark = [pytest.mark.cloud, pytest.mark.last]

NOT_BY_A_CALL = {"iam:PassRole", "ec2:CreateTags"}
"""EC2 asks for these while it carries out a RunInstances, which the table says."""
NOTHING = {NOT_IN_THIS_CLOUD, UNANSWERED, "ParamValidation"}


def called() -> set[tuple[str, str]]:
    """Without those to ECS, whose policy is in the stack of a cluster (`test_cluster.py`)."""
    return {call for call, codes in made.items() if codes - NOTHING and call[0] != "ecs"}


def test_what_was_called_is_allowed(deployed: Deployed) -> None:
    allowed = {action for each in statements(deployed, "control") for action in as_list(each["Action"])}
    for service, operation in called():
        call = CALLS.get((Role.CONTROL, service, operation))
        assert call is not None, f"{service} {operation} is called, and is not in the table"
        assert set(call.actions) <= allowed


@pytest.mark.whole_layer
def test_what_is_allowed_was_called(deployed: Deployed) -> None:
    allowed = {action for each in statements(deployed, "control") for action in as_list(each["Action"])}
    of_calls = {call: CALLS[Role.CONTROL, *call].actions for call in called()}

    used = {action for actions in of_calls.values() for action in actions}
    assert allowed - used - NOT_BY_A_CALL == set()
    table = {(call.service, call.operation) for call in CALLS.values() if call.role is Role.CONTROL}
    assert table - set(of_calls) == set()
