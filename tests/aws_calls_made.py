"""Which calls to AWS the code under test made in this process, and what came of them: they are compared with what
policies allow once all tests on the cloud have run (`tests/deploy/aws/test_calls_made.py`)."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

made: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
"""Service and operation -> codes of errors, "" for an answer."""
UNANSWERED = "no answer"


def watch() -> None:
    """Note each call of this process from now on, however tests replace what is around it."""
    from fleet.clouds.aws import calls

    send = calls.send

    def noted(service: str, operation: str, region: str, params: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = send(service, operation, region, params)
        except calls.CallFailed as error:
            made[service, operation].add(error.code or UNANSWERED)
            raise
        made[service, operation].add("")
        return answer

    calls.send = noted
