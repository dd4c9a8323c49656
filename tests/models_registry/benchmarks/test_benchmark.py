"""Versions are compared only where both were measured under the same conditions, as they are now."""

from typing import Any

import pytest

from models_registry.benchmarks.models import Benchmark, BenchmarkPoint
from models_registry.benchmarks.planning.measurements import Aim, best_configuration
from models_registry.benchmarks.planning.workload import BenchmarkKey, ComparedGoodput, parse_workload, version_digest
from models_registry.benchmarks.selectors import benchmarks_of_use, goodput_compared, measured_of
from models_registry.versions.models import ModelVersion
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

KIND, WORKLOAD, SLO = "local.cpu", "1000+150", "ttft=500,itl=50"


def measured(version: ModelVersion, goodput: float, *, fingerprint: str = "f", **columns: Any) -> Benchmark:
    what = (version_digest(version.spec(), KIND), KIND, fingerprint, parse_workload(WORKLOAD).digest, SLO, 0)
    key = BenchmarkKey(*what, columns.get("split", ""))
    row = Benchmark.objects.create(
        **{
            "version": version, "deployment": "d", "region": "r", "state": "done", "instance_type": KIND,
            "workload": WORKLOAD, "slo": SLO, "cells": 2, "chips": 4, "goodput": goodput, "key": key.digest,
            "conditions": key.conditions, "version_digest": key.version, "fingerprint": fingerprint,
            "actor": "ada", "created_at": NOW, "ended_at": NOW, **columns,
        }
    )  # fmt: skip
    figures = {
        "tokens_per_s": goodput * 150, "tokens_per_s_per_user": 100 / goodput, "dollars_per_mtoken": None,
        "joules_per_token": None,
    }  # fmt: skip
    BenchmarkPoint.objects.create(
        benchmark=row, number=1, rate=goodput, verdict="held", reason="r", figures=figures, histograms={},
        measured_at=NOW,
    )  # fmt: skip
    return row


def test_two_versions_compare_under_the_same_conditions_by_their_newest() -> None:
    old, new = rows.version("1"), rows.version("2", max_concurrency=8)
    measured(old, 8)
    measured(new, 5)
    measured(new, 6)
    measured(new, 9, fingerprint="other software")
    label = f"{WORKLOAD} within {SLO}"
    assert goodput_compared(old, new, KIND) == (ComparedGoodput(label, 4.0, 3.0),)
    assert goodput_compared(old, new, "another.type") == ()


def test_a_version_that_has_changed_since_was_not_measured() -> None:
    old, new = rows.version("1"), rows.version("2")
    measured(old, 8)
    measured(new, 8, version_digest="of before")
    assert goodput_compared(old, new, KIND) == ()


def test_cells_that_were_told_apart_otherwise_do_not_compare() -> None:
    old, new = rows.version("1"), rows.version("2", max_concurrency=8)
    measured(old, 8)
    measured(new, 5, split="1p+1d")
    assert goodput_compared(old, new, KIND) == ()
    measured(old, 6, split="1p+1d")
    assert [(one.before, one.after) for one in goodput_compared(old, new, KIND)] == [(3.0, 2.5)]
    best = best_configuration(filter(None, map(measured_of, benchmarks_of_use(WORKLOAD, SLO))), Aim.GOODPUT)
    assert best is not None
    assert best.reason == f"2 requests per second and chip, 1.5 for the next, {old.reference} on {KIND} as 1p+1d"
    assert Benchmark(cells=4, split="1p+3d").answering == 3
    assert Benchmark(cells=4).answering == 4


def test_the_best_of_a_use_is_told_with_its_reason() -> None:
    old, new = rows.version("1"), rows.version("2", max_concurrency=8)
    measured(old, 8)
    measured(new, 6)
    measured(new, 99, slo="ttft=9,itl=9")
    found = [one for row in benchmarks_of_use(WORKLOAD, SLO) if (one := measured_of(row))]
    best = best_configuration(found, Aim.GOODPUT)
    assert best is not None
    assert (best.chosen.version, best.chosen.goodput_per_chip) == (old.reference, 2.0)
    assert best.reason == f"2 requests per second and chip, 1.5 for the next, {new.reference} on {KIND}"
    fast = best_configuration(found, Aim.SPEED)
    assert fast is not None
    assert fast.chosen.version == new.reference
    assert best_configuration(found, Aim.COST) is None
