"""Reads the sampled requests of a chain, joined by trace, and measures it: for the page of a deployment and the API."""

from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from fleet.chains.planner import (
    LONGEST_CHAIN,
    Chain,
    ChainedRequest,
    ChainFigures,
    LinkedRequest,
    chain_burn,
    chain_figures,
    join_by_trace,
)
from fleet.deployments.models import Deployment
from fleet.deployments.planner import Burn
from fleet.requests.models import RequestSample
from fleet.requests.planner import FAILED

MOST_JOINED = 20_000
"""Newest requests with a trace: five hours of 32 in a minute from two cells, and less of a larger deployment."""
MOST_OF_TRACE = 200
"""Newest requests of one trace: clients may give many requests the same."""
FIGURES_OVER = timedelta(hours=1)
BURN_OVER = timedelta(hours=6)
"""The longest window of the alarms for which samples are kept."""
_COLUMNS = tuple(field.name for field in fields(LinkedRequest))


@dataclass(frozen=True, slots=True)
class ChainView:
    """`chain` None: the deployment has no planner. `plans`: deployments whose requests it plans. `figures`: of the last
    hour."""

    deployment: str
    chain: Chain | None
    plans: tuple[str, ...]
    figures: ChainFigures | None = None
    burn: Burn | None = None


def chain_view(deployment: Deployment, now: datetime) -> ChainView:
    """Three queries, or one without a planner."""
    chain, plans = deployment.chain_stated(), tuple(chains_of_planner(deployment.name))
    if chain is None:
        return ChainView(deployment.name, None, plans)
    found = chained_requests(deployment.name, chain, now - BURN_OVER)
    recent = [each for each in found if each.request.at >= now - FIGURES_OVER]
    burn = chain_burn(chain, found, now, BURN_OVER.total_seconds())
    return ChainView(deployment.name, chain, plans, chain_figures(chain, recent), burn)


def chained_requests(deployment: str, chain: Chain, since: datetime) -> list[ChainedRequest]:
    """Answered requests of a deployment since then, with those of its planner; newest first. Two queries."""
    requests = _linked(deployment, since)
    if not requests:
        return []
    return join_by_trace(_linked(chain.planner, requests[-1].at - LONGEST_CHAIN - timedelta(minutes=1)), requests)


@dataclass(frozen=True, slots=True)
class TracedChain:
    """A chain of one trace, with the objective of its deployment."""

    deployment: str
    chain: Chain
    request: ChainedRequest

    @property
    def is_late(self) -> bool:
        return self.request.sum_ms > self.chain.ttft_ms

    @property
    def is_planner_late(self) -> bool:
        return self.chain.planner_ms is not None and self.request.planner_ms > self.chain.planner_ms


def chains_of_trace(trace: str) -> list[TracedChain]:
    """The chains of a trace, newest first. Two queries."""
    kept = RequestSample.objects.filter(trace=trace).exclude(trace="").exclude(kind__in=FAILED).order_by("-at")
    by_deployment: dict[str, list[LinkedRequest]] = {}
    for deployment, *columns in kept.values_list("deployment", *_COLUMNS)[:MOST_OF_TRACE]:
        by_deployment.setdefault(deployment, []).append(LinkedRequest(*columns))
    found = []
    for row in Deployment.objects.filter(name__in=by_deployment).exclude(chain={}).only("name", "chain"):
        if chain := row.chain_stated():
            joined = join_by_trace(by_deployment.get(chain.planner, ()), by_deployment[row.name])
            found += [TracedChain(row.name, chain, each) for each in joined]
    return sorted(found, key=lambda each: each.request.request.at, reverse=True)


def chains_of_planner(planner: str) -> list[str]:
    """Deployments whose requests this deployment plans."""
    return list(Deployment.objects.filter(chain__planner=planner).order_by("name").values_list("name", flat=True))


def planners_stated() -> dict[str, str]:
    """Deployment -> its planner, of those that have one."""
    return dict(Deployment.objects.exclude(chain={}).values_list("name", "chain__planner"))


def _linked(deployment: str, since: datetime) -> list[LinkedRequest]:
    """Newest first."""
    rows = RequestSample.objects.filter(deployment=deployment, at__gte=since).exclude(trace="").exclude(kind__in=FAILED)
    return [LinkedRequest(*row) for row in rows.order_by("-at").values_list(*_COLUMNS)[:MOST_JOINED]]
