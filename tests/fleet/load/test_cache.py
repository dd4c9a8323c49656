"""Sums of recent reports on routing by prefix caches."""

from datetime import timedelta

import msgspec
import pytest

from engine_agent.protocol.load_messages import CacheLoad, Load
from engine_agent.protocol.messages import Observed, Report
from engine_agent.protocol.states import EngineState
from fleet.load.selectors import cache_totals
from fleet.nodes.services.reports import ReceivedReport, reports_store
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

CACHE = CacheLoad(
    True,
    blocks=10,
    asked_tokens_total=100,
    predicted_tokens_total=60,
    found_tokens_total=58,
    other_tokens_total=7,
    other_found_tokens_total=1,
)


def reported(node: str, cell: str, cache: CacheLoad | None) -> None:
    observed = Observed(EngineState.READY, cell=cell, generation=1, rank=0)
    load = msgspec.structs.replace(Load(), cache=cache)
    reports_store([ReceivedReport(node, "k", True, NOW, NOW, Report(1, observed, load=load))])


def test_totals_are_of_ready_cells_whose_leaders_spoke_of_late() -> None:
    for number in (1, 2, 3):
        rows.cell(f"c{number}", rows.node(f"n-{number}"))
    reported("n-1", "c1", CACHE)
    reported("n-2", "c2", CACHE)
    reported("n-3", "c3", None)
    (totals,) = cache_totals(NOW).values()
    assert totals == {"asked": 200, "predicted": 120, "found": 116, "other": 14, "other_found": 2}
    assert cache_totals(NOW + timedelta(minutes=1)) == {}
