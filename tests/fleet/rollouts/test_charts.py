"""Each cell counts for the version that it ran at the time, and for none during its update."""

from datetime import timedelta
from typing import Any

import pytest

from controlplane.dashboard.charts import Chart
from fleet.cells.models import Cell, Disruption
from fleet.load.models import LoadSubject, LoadWindow
from fleet.load.services import history_trim
from fleet.rollouts.models import Rollout, RolloutPoints
from fleet.rollouts.pages.data import rollout_charts
from fleet.rollouts.planning.gates import length_of
from fleet.rollouts.services import rollout_points_keep
from kernel.events import event_record
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db
START = NOW.replace(minute=0, second=0, microsecond=0)


@pytest.fixture
def rollout() -> Rollout:
    rows.deployment(cells=2)
    version = rows.version("2")
    for name in ("a", "b"):
        _measured(rows.cell(name), 100.0 if name == "a" else 40.0)
    made = Rollout.objects.create(
        deployment_id="sim-70b", from_version=rows.version("1"), to_version=version, reason="r",
        region_order=["us-east-1"], policy={}, actor="ada", created_at=START, state_since=START,
    )  # fmt: skip
    cell = Cell.objects.get(pk="a")
    Disruption.objects.create(
        cell=cell, deployment_id="sim-70b", region_id=cell.region_id, cause="rollout", rollout=made, reason="r",
        opened_at=START + timedelta(minutes=2), closed_at=START + timedelta(minutes=4),
    )  # fmt: skip
    return made


def _measured(cell: Cell, ttft_ms: float) -> None:
    subject = LoadSubject.objects.create(name=f"cell:{cell.pk}", seen_at=START)
    for step in range(-8, 40):
        counts: dict[str, Any] = {"requests": 30, "errors": 3, "slow": 0, "cells": 1, "in_flight": 0, "queued": 0}
        LoadWindow.objects.create(
            subject=subject, step_s=15, at=START + timedelta(seconds=15 * step), covered_s=15, tokens_per_s=0,
            ttft_p95_ms=ttft_ms, **counts,
        )  # fmt: skip


def at(chart: Chart, minutes: float) -> tuple[float | None, ...]:
    place = int((START + timedelta(minutes=minutes) - chart.start).total_seconds() // chart.step_s)
    return tuple(series.values[place] for series in chart.series)


def test_a_cell_counts_for_the_version_that_it_ran(rollout: Rollout) -> None:
    ttft, _, errors = rollout_charts(rollout, START + timedelta(minutes=9))
    assert [series.name for series in ttft.series] == ["new version", "old version"]
    assert at(ttft, 1) == (None, 100.0)
    assert at(ttft, 3) == (None, 40.0)
    assert at(ttft, 6) == (100.0, 40.0)
    assert at(errors, 6) == (10.0, 10.0)


def test_bands_tell_stages_and_bakes(rollout: Rollout) -> None:
    for minute, state, stage in ((0, "running", 0), (4, "baking", 0), (5, "baking", 0), (6, "rolling_back", 0)):
        event_record(
            kind=f"rollout.{state}", message="m", now=START + timedelta(minutes=minute), deployment="sim-70b",
            detail={"rollout": rollout.pk, "stage": stage},
        )  # fmt: skip
    bands = rollout_charts(rollout, START + timedelta(minutes=9))[0].bands
    assert [band.label for band in bands] == ["us-east-1 canary", "bake", "rolling back"]
    assert [band.end for band in bands][:2] == [START + timedelta(minutes=4), START + timedelta(minutes=6)]


def test_a_rollout_long_ended_is_shown_in_coarse_steps(rollout: Rollout) -> None:
    rollout.ended_at = START + timedelta(minutes=8)
    assert rollout_charts(rollout, START + timedelta(days=3))[0].step_s == 3600


def test_the_points_of_a_rollout_are_kept_with_it_after_load_history_is_thinned(rollout: Rollout) -> None:
    for minute in range(10):
        rollout_points_keep(now=START + timedelta(minutes=minute, seconds=1))
    rollout.ended_at = START + timedelta(minutes=6)
    rollout.save()
    rollout_points_keep(now=START + timedelta(minutes=10))
    seen = rollout_charts(rollout, START + timedelta(minutes=10))
    history_trim(now=START + timedelta(days=3))
    assert not LoadWindow.objects.exists()
    kept = rollout_charts(rollout, START + timedelta(days=3))
    assert kept == seen
    ttft, _, errors = kept
    assert ttft.step_s == 15
    assert (at(ttft, 1), at(ttft, 3), at(ttft, 6)) == ((None, 100.0), (None, 40.0), (100.0, 40.0))
    assert at(errors, 6) == (10.0, 10.0)


def test_what_is_kept_of_a_long_rollout_is_bounded_and_stays_in_its_place(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.rollouts.services.MAX_POINTS", 13)
    for step in range(40):
        rollout_points_keep(now=START + timedelta(seconds=15 * step))
    kept = RolloutPoints.objects.get()
    assert length_of(kept.lines) <= 13
    assert kept.step_s == 60
    ttft = rollout_charts(rollout, START + timedelta(minutes=10))[0]
    assert (at(ttft, 1), at(ttft, 3), at(ttft, 6)) == ((None, 100.0), (None, 40.0), (100.0, 40.0))


def test_a_rollout_whose_points_were_not_kept_for_hours_has_a_gap(rollout: Rollout) -> None:
    rollout_points_keep(now=START + timedelta(minutes=5))
    rollout_points_keep(now=START + timedelta(hours=5))
    kept = RolloutPoints.objects.get()
    assert length_of(kept.lines) * kept.step_s == pytest.approx(5 * 3600 + 180, abs=kept.step_s)


def test_samples_newer_than_the_stored_points_are_shown(rollout: Rollout) -> None:
    rollout_points_keep(now=START + timedelta(minutes=5))
    stored = rollout_charts(rollout, START + timedelta(minutes=5))[0]
    later = rollout_charts(rollout, START + timedelta(minutes=9))[0]
    assert len(later.series[0].values) - len(stored.series[0].values) == 16
    assert at(later, 8) == (100.0, 40.0)
    assert RolloutPoints.objects.get(rollout=rollout).lines["ttft"]["new"] == list(stored.series[0].values)
