"""EC2's error codes have one meaning each; unknown codes are refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.pools import DEFINITE, LaunchOutcome, Market, Scope
from fleet.clouds.aws.actions import LATER, NO_CAPACITY, NO_QUOTA, TEXT_MOST, Verdict, classify, quota_name
from fleet.clouds.base import AttemptEnded, Later, NoCapacity, NoQuota, ProviderError, Unknown

MEANINGS = {
    LaunchOutcome.NO_CAPACITY: (
        "InsufficientInstanceCapacity", "ReservationCapacityExceeded", "InsufficientFreeAddressesInSubnet",
        "Unsupported", "UnfulfillableCapacity", "SpotMaxPriceTooLow", "InsufficientHostCapacity",
    ),
    LaunchOutcome.NO_QUOTA: (
        "VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "PendingVerification",
    ),
    LaunchOutcome.LATER: ("RequestLimitExceeded", "InternalError", "Unavailable", "ServiceUnavailable"),
    LaunchOutcome.ATTEMPT_ENDED: ("IdempotentInstanceTerminated",),
    LaunchOutcome.MISMATCHED: ("IdempotentParameterMismatch",),
    LaunchOutcome.REFUSED: (
        "InvalidParameterValue", "InvalidSubnetID.NotFound", "UnauthorizedOperation", "OptInRequired",
        "InvalidUserData.Malformed", "InvalidIamInstanceProfileArn.Malformed", "whatever is new",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "code"), [(outcome, code) for outcome, codes in MEANINGS.items() for code in codes]
)
def test_each_code_means_one_thing(outcome: LaunchOutcome, code: str) -> None:
    for status in (400, 500, 503) if outcome is not LaunchOutcome.REFUSED else (400, 403):
        assert classify(code, "why", status).outcome is outcome


def test_no_code_is_listed_twice_or_only_here() -> None:
    assert set(MEANINGS[LaunchOutcome.NO_CAPACITY]) == NO_CAPACITY
    assert set(MEANINGS[LaunchOutcome.NO_QUOTA]) == NO_QUOTA
    assert set(MEANINGS[LaunchOutcome.LATER]) == LATER
    codes = [code for listed in MEANINGS.values() for code in listed]
    assert len(set(codes)) == len(codes)


def test_a_full_subnet_reaches_further_than_a_pool() -> None:
    assert classify("InsufficientFreeAddressesInSubnet", "", 400).scope is Scope.SUBNET
    assert classify("InsufficientInstanceCapacity", "", 500).scope is Scope.POOL


def test_a_person_is_called_where_waiting_does_not_help() -> None:
    called = {outcome for outcome, codes in MEANINGS.items() if classify(codes[0], "", 400).needs_person}
    assert called == {LaunchOutcome.NO_QUOTA, LaunchOutcome.REFUSED, LaunchOutcome.MISMATCHED}


@given(st.text(max_size=40), st.text(max_size=2000), st.integers(500, 599))
def test_no_server_error_is_taken_for_a_refusal(code: str, message: str, status: int) -> None:
    verdict = classify(code, message, status)
    assert verdict.outcome is not LaunchOutcome.REFUSED
    assert len(verdict.text) <= TEXT_MOST + 1


def test_what_aws_said_is_kept() -> None:
    assert classify("OptInRequired", "You are not subscribed", 401) == Verdict(
        LaunchOutcome.REFUSED, "OptInRequired: You are not subscribed", needs_person=True
    )


def test_each_outcome_has_its_exception_of_providers() -> None:
    exceptions: dict[LaunchOutcome, type[ProviderError]] = {
        LaunchOutcome.NO_CAPACITY: NoCapacity,
        LaunchOutcome.NO_QUOTA: NoQuota,
        LaunchOutcome.REFUSED: ProviderError,
        LaunchOutcome.ATTEMPT_ENDED: AttemptEnded,
        LaunchOutcome.LATER: Later,
        LaunchOutcome.UNKNOWN: Unknown,
        LaunchOutcome.MISMATCHED: Unknown,
    }
    assert set(exceptions) == set(LaunchOutcome) - {LaunchOutcome.LAUNCHED}
    doubtful = {outcome for outcome in exceptions if outcome not in DEFINITE}
    assert all(exceptions[outcome].may_repeat for outcome in doubtful)


@pytest.mark.parametrize(
    ("instance_type", "market", "name"),
    [
        ("trn1.32xlarge", Market.ON_DEMAND, "Running On-Demand Trn instances"),
        ("p5.48xlarge", Market.RESERVED, "Running On-Demand P instances"),
        ("g6e.48xlarge", Market.OPEN, "Running On-Demand G and VT instances"),
        ("c7i.2xlarge", Market.ON_DEMAND, "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
        ("inf2.48xlarge", Market.SPOT, "the quota of Spot requests for Inf instances"),
    ],
)
def test_quotas_have_the_names_of_the_console(instance_type: str, market: Market, name: str) -> None:
    assert quota_name(instance_type, market) == name
