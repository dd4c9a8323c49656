"""Whether the requests that ingresses refused, as clients saw them, are those that the control plane counted."""

import re
from collections.abc import Iterable, Mapping

from bench.fleet.live_fleet import Fleet
from lab.steady_load import Answer

REFUSED = re.compile(r'^switchyard_requests_refused\{(?=[^}]*deployment="([^"]*)")[^}]*\} (\S+)$', re.MULTILINE)


def refused_counts(fleet: Fleet, deployment: str) -> dict[str, int]:
    """Refused requests of a deployment since counting began, by where it can be read.

    Raises:
        httpx.HTTPError: web did not answer.
    """
    metrics = REFUSED.findall(fleet.metrics())
    return {
        "usage": fleet.get("usage", deployment=deployment)["totals"]["refused"],
        "Prometheus": round(sum(float(value) for name, value in metrics if name == deployment)),
    }


def differences(answers: Iterable[Answer], before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Where something else was counted than clients saw."""
    seen = sum(answer.was_refused for answer in answers)
    return [
        f"clients were refused {seen} times, {place} counted {count - before[place]}"
        for place, count in after.items()
        if count - before[place] != seen
    ]
