"""What an error of EC2 says about a launch. Pure.

Only what is listed moves a launch to another pool or repeats it. Everything else is a refusal, with its text: a wrong
instance profile is no lack of capacity. Answers that are no error of EC2 at all (time-outs, closed connections, what
cannot be parsed) are for the caller to take as `unknown`.
"""

from dataclasses import dataclass

from fleet.planning.markets import Market
from fleet.planning.pools import LaunchOutcome, Scope, quota_family

TEXT_MOST = 400
"""Characters of AWS's message that are kept: an encoded one of IAM has thousands."""

NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "ReservationCapacityExceeded",
        "InsufficientFreeAddressesInSubnet",
        "Unsupported",  # this zone has none of the type
        "UnfulfillableCapacity",
        "SpotMaxPriceTooLow",
        "InsufficientHostCapacity",
    }
)
NO_QUOTA = frozenset(
    {"VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "PendingVerification"}
)
LATER = frozenset({"RequestLimitExceeded", "InternalError", "Unavailable", "ServiceUnavailable"})
THROTTLED = "RequestLimitExceeded"
"""Of these, the one that says that we ask too often."""
OF_THE_SUBNET = frozenset({"InsufficientFreeAddressesInSubnet"})

_ONE_BY_ONE = {
    "IdempotentInstanceTerminated": LaunchOutcome.ATTEMPT_ENDED,
    "IdempotentParameterMismatch": LaunchOutcome.MISMATCHED,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an error means. `text`: what AWS said. `needs_person`: nothing changes until somebody does something."""

    outcome: LaunchOutcome
    text: str
    scope: Scope = Scope.POOL
    needs_person: bool = False


def classify(code: str, message: str, http_status: int) -> Verdict:
    """What an error answer of EC2 to `RunInstances` means, by its code.

    A 5xx whose code is not known may have been carried out, as AWS's advice on retries has it
    (https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html).
    """
    text = f"{code}: {message}"
    text = text if len(text) <= TEXT_MOST else f"{text[:TEXT_MOST]}…"
    if code in NO_CAPACITY:
        return Verdict(LaunchOutcome.NO_CAPACITY, text, Scope.SUBNET if code in OF_THE_SUBNET else Scope.POOL)
    if code in NO_QUOTA:
        return Verdict(LaunchOutcome.NO_QUOTA, text, needs_person=True)
    if code in LATER:
        return Verdict(LaunchOutcome.LATER, text)
    if code in _ONE_BY_ONE:
        return Verdict(_ONE_BY_ONE[code], text, needs_person=_ONE_BY_ONE[code] is LaunchOutcome.MISMATCHED)
    if http_status >= 500:
        return Verdict(LaunchOutcome.UNKNOWN, text)
    return Verdict(LaunchOutcome.REFUSED, text, needs_person=True)


def quota_name(instance_type: str, market: Market) -> str:
    """The quota that bounds such machines, as the console of Service Quotas names it, where it has one name."""
    family = _FAMILIES.get(quota_family(instance_type), quota_family(instance_type).capitalize())
    if market is Market.SPOT:
        return f"the quota of Spot requests for {family} instances"
    return f"Running On-Demand {family} instances"


_FAMILIES = {"standard": "Standard (A, C, D, H, I, M, R, T, Z)", "g": "G and VT"}
