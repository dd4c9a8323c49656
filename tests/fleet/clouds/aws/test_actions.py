"""The table of calls: each exists in AWS, occurs once, and roles do not overlap."""

import botocore.session
import pytest

from fleet.clouds.aws.actions import CALLS, Role, actions_of


def test_every_call_is_one_that_aws_has() -> None:
    session = botocore.session.get_session()
    for service in sorted({call.service for call in CALLS.values()}):
        known = set(session.get_service_model(service).operation_names)
        assert {call.operation for call in CALLS.values() if call.service == service} <= known


def test_who_changes_something_is_bound_to_what_is_ours() -> None:
    reads = ("Describe", "Get", "List", "Decode")
    assert not [call for call in CALLS.values() if not call.operation.startswith(reads) and not call.bound]


@pytest.mark.parametrize("role", Role)
def test_no_role_may_widen_itself_or_end_what_a_stack_owns(role: Role) -> None:
    actions = actions_of(role)
    assert not [action for action in actions if "*" in action]
    assert {action for action in actions if action.startswith("iam:")} <= {"iam:PassRole"}
    assert not [action for action in actions if action.startswith("cloudformation:Delete")]


def test_a_node_reads_artifacts_and_nothing_else() -> None:
    assert actions_of(Role.NODE) == {"s3:GetObject", "s3:ListBucket", "kms:Decrypt"}


def test_only_the_control_plane_launches_and_ends() -> None:
    assert {call.role for call in CALLS.values() if call.operation in ("RunInstances", "TerminateInstances")} == {
        Role.CONTROL
    }
