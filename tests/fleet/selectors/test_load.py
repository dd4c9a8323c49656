"""The load of a cell is that of its leader's last report about this generation, as the agent sent it."""

import msgspec
import pytest

from engine_agent.protocol.messages import Load, Observed, Report
from engine_agent.protocol.states import EngineState
from fleet.models import Cell
from fleet.selectors.cell import cells_described
from fleet.selectors.load import CellLoad, cell_load
from fleet.selectors.rollout import counters_reported
from fleet.services.reports import ReceivedReport, reports_store
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

FULL = Load(
    in_flight=3,
    queued=1,
    tokens_per_s=41.5,
    ttft_p50_ms=48.0,
    requests_total=9,
    errors_total=2,
    ttft_counts={12: 4, 13: 5},
    itl_counts={3: 70},
)


def reported(load: Load | None, *, generation: int = 1) -> Cell:
    rows.cell("c1", rows.node("n-a"), rows.node("n-b"))
    observed = Observed(EngineState.READY, cell="c1", generation=generation, rank=0)
    reports_store([ReceivedReport("n-a", "k", True, NOW, NOW, Report(1, observed, load=load))])
    return cells_described().get()


def test_what_an_agent_reports_is_read_whatever_a_json_column_makes_of_it() -> None:
    load = cell_load(reported(FULL))
    assert (load.in_flight, load.queued, load.tokens_per_s, load.ttft_p50_ms) == (3, 1, 41.5, 48.0)
    assert (load.itl_p99_ms, load.reported_at) == (None, NOW)


def test_every_count_survives_the_way_through_the_database() -> None:
    leader = reported(FULL).members.all()[0].node.report
    counters = counters_reported(leader)
    assert counters is not None
    assert (counters.ttft, counters.itl) == (FULL.ttft_counts, FULL.itl_counts)


def test_a_load_of_another_generation_says_nothing_of_this_one() -> None:
    assert cell_load(reported(msgspec.structs.replace(FULL), generation=2)) == CellLoad()


def test_without_a_report_there_are_zeros() -> None:
    assert cell_load(reported(None)) == CellLoad()
