"""Measurements of a version come from its ready cells, from the time each became ready."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.cells.models import Cell
from fleet.load.models import LoadSubject, LoadWindow
from models_registry.versions.pages.data import version_measures
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def measured(cell: Cell, minutes_ago: float, **numbers: Any) -> None:
    subject, _ = LoadSubject.objects.get_or_create(name=f"cell:{cell.pk}", defaults={"seen_at": NOW})
    counts = {"requests": 10, "errors": 1, "slow": 0, "cells": 1, "in_flight": 2.0, "queued": 0, "tokens_per_s": 50.0}
    at = NOW - timedelta(minutes=minutes_ago)
    LoadWindow.objects.create(subject=subject, step_s=15, at=at, covered_s=15, **(counts | numbers))


def test_peaks_and_worst_latencies_since_a_cell_is_ready() -> None:
    cell = rows.cell("a", state="ready", state_since=NOW - timedelta(minutes=10))
    other = rows.cell("b", state="failed", state_since=NOW - timedelta(minutes=10))
    measured(cell, 5, tokens_per_s=80.0, ttft_p95_ms=300.0)
    measured(cell, 4, in_flight=7.0)
    measured(cell, 20, tokens_per_s=999.0)
    measured(other, 5, tokens_per_s=999.0)
    (row,) = version_measures(cell.model_version, NOW)
    assert (row.cells, row.requests, row.errors) == (1, 20, 2)
    assert (row.peak_tokens_per_s, row.peak_in_flight, row.ttft_p95_ms, row.itl_p95_ms) == (80.0, 7.0, 300.0, None)


def test_what_was_not_measured_is_left_out() -> None:
    assert version_measures(rows.cell("a").model_version, NOW) == ()
