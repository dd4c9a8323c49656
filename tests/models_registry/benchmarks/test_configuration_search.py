"""A search from its start to its result: drafts, rollouts and benchmarks, continued by another process after each kill,
and a reason for every configuration. The test plays the fleet.
"""

from datetime import timedelta
from typing import Any

import pytest

from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.benchmarks import selectors as benchmark_target
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint, ConfigurationSearch, SearchTrial
from models_registry.benchmarks.planning.configuration_search import Standing, choice_text
from models_registry.benchmarks.planning.measurements import Machines
from models_registry.benchmarks.selectors import (
    BenchmarkTarget,
    ServeRequest,
    Serving,
    ServingState,
    benchmarks_of_use,
    candidate_rows,
)
from models_registry.benchmarks.services.configuration_search import SearchRequest, search_cancel, search_start
from models_registry.benchmarks.services.search_runner import SERVES_WITHIN, search_advance
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import ValidationState
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

WORKLOAD, SLO = "1000+150", "ttft=3000,itl=40"
BASE_S, WORK_S = 0.020, 0.1625


class Fleet:
    """Serves the requested version immediately, unless `answer` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version = rows.version(nodes=1, max_concurrency=64)
        rows.deployment()
        self.serves = self.version.reference
        self.asked: list[str] = []
        self.answer: Serving | None = None
        self.regions: tuple[str, ...] = ("us-east-1",)
        self.cells: Any = 4
        monkeypatch.setattr(benchmark_target._traffic, "describe", self.describe)
        monkeypatch.setattr(benchmark_target._traffic, "serve", self.serve)

    def describe(self, deployment: str, region: str) -> BenchmarkTarget:
        model, _, name = self.serves.partition("@")
        version = ModelVersion.objects.get(model=model, version=name)
        machines = Machines(1, 1, 0, 0)
        split = choice_text([("", self.cells)])[1:] if isinstance(self.cells, dict) else ""
        where = (deployment, "us-east-1", version.pk, KIND, "f", ("c#1",), machines, 0, self.regions)
        return BenchmarkTarget(*where, split, self.cells)

    def serve(self, request: ServeRequest) -> Serving:
        self.asked.append(request.version)
        if self.answer is not None:
            return self.answer
        self.serves, self.cells = request.version, self.cells if request.cells is None else request.cells
        return Serving(ServingState.SERVES)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


def start(fleet: Fleet, **fields: Any) -> ConfigurationSearch:
    varied = {"engine_options.max_num_seqs": [4, 16, 64]}
    request = SearchRequest(fleet.version, "sim-70b", **{"varied": varied, "workload": WORKLOAD, "slo": SLO, **fields})
    return search_start(request, actor="ada", now=NOW)


def goodput_of(version: ModelVersion) -> float:
    """From the step model, so that predictions are right."""
    places = float(version.engine_options.get("max_num_seqs", version.max_concurrency))
    return min((1 - BASE_S / 0.040) / WORK_S, 1 / (150 * BASE_S / places + WORK_S))


def measure(benchmark: Benchmark) -> None:
    goodput = goodput_of(benchmark.version)
    for number, rate in enumerate((goodput / 2, goodput)):
        step_s = BASE_S / (1 - rate * WORK_S)
        figures = {
            "requests": 200, "failed": 0, "completion_tokens": 30_000, "tokens_per_s": rate * 150,
            "itl_p50_ms": step_s * 1000, "tokens_per_s_per_user": 1 / step_s, "dollars_per_mtoken": None,
            "joules_per_token": None,
        }  # fmt: skip
        BenchmarkPoint.objects.create(
            benchmark=benchmark, number=number + 1, rate=rate, verdict="held", reason="r", figures=figures,
            histograms={}, measured_at=NOW,
        )  # fmt: skip
    Benchmark.objects.filter(pk=benchmark.pk).update(
        state="done", goodput=goodput, cells=1, chips=1, instance_type=KIND, ended_at=NOW,
        statistics={"prompt_tokens_mean": 1000.0, "output_tokens_mean": 150.0},
    )  # fmt: skip


def run(row: ConfigurationSearch, *, minutes: float = 0.0, most: int = 200) -> ConfigurationSearch:
    """Advance until the search ends; everything that it waits for succeeds."""
    for _ in range(most):
        row.refresh_from_db()
        if row.state != "running":
            break
        search_advance(row, now=NOW + timedelta(minutes=minutes))
        ModelVersion.objects.filter(state="draft", pk__in=_not_invalid()).update(state="validated")
        for benchmark in Benchmark.objects.filter(state="queued").select_related("version"):
            measure(benchmark)
    return row


def _not_invalid() -> list[int]:
    failed = ValidationState.FAILED.value
    return list(ModelVersion.objects.exclude(validations__state=failed).values_list("pk", flat=True))


def standings(row: ConfigurationSearch) -> dict[int, tuple[Standing, str]]:
    return {one.candidate.number: (one.standing, one.reason) for one in candidate_rows(row)}


def test_the_best_is_found_few_are_measured_and_the_deployment_has_what_it_had(fleet: Fleet) -> None:
    row = run(start(fleet))
    assert (row.state, row.best is not None) == ("done", True)
    assert row.best is not None
    assert dict(row.best.as_choice())["engine_options.max_num_seqs"] == 64
    assert fleet.serves == fleet.version.reference
    pruned = [number for number, (standing, _) in standings(row).items() if standing is Standing.PRUNED]
    assert pruned == [1], "four places are predicted to carry a third"
    fidelities = list(SearchTrial.objects.order_by("id").values_list("candidate__number", "fidelity"))
    assert fidelities[0][1] == 0.25
    assert (row.best.number, 1.0) in fidelities
    assert list(Event.objects.filter(kind__startswith="search.").order_by("pk").values_list("kind", flat=True)) == [
        "search.started", "search.found", "search.done",
    ]  # fmt: skip


def test_shorter_points_are_asked_for_first_and_are_never_the_best_of_a_use(fleet: Fleet) -> None:
    row = run(start(fleet, rules={"min_requests": 400}))
    lengths = list(Benchmark.objects.order_by("pk").values_list("trial__fidelity", "rules__min_requests"))
    assert {length for fidelity, length in lengths if fidelity == 0.25} == {100}
    assert {length for fidelity, length in lengths if fidelity == 1} == {400}
    whole = benchmarks_of_use(WORKLOAD, SLO)
    assert {one.trial.fidelity for one in whole} == {1.0}
    assert row.best is not None
    assert row.best.version_id in {one.version_id for one in whole}


def test_what_no_draft_can_be_made_of_is_refused_before_anything_moves(fleet: Fleet) -> None:
    row = start(fleet, varied={"engine_options.max_num_seqs": [8], "engine_options.plugin": [None, "x"]})
    assert [one.refused != "" for one in row.candidates.all()] == [False, True]
    with pytest.raises(InvalidInput, match="none of 1 configurations is possible"):
        start(fleet, varied={"engine_options.plugin": ["x"]})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"varied": {}}, "nothing is varied"),
        (
            {"varied": {"max_concurrency": list(range(1, 33)), "parallelism.tp": list(range(1, 33))}},
            "1024 combinations",
        ),
        ({"workload": "all"}, "PROMPT"),
        ({"slo": "fast"}, "slo"),
        ({"rules": {"luck": 1}}, "luck"),
        ({"most_trials": 0}, "most_trials is 0"),
        ({"most_hours": 1e9}, "most_hours"),
    ],
)
def test_what_makes_no_sense_is_refused(fleet: Fleet, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        start(fleet, **fields)
    assert not ConfigurationSearch.objects.exists()


def test_a_deployment_of_several_regions_or_of_another_version_is_left_alone(fleet: Fleet) -> None:
    fleet.regions = ("eu-west-1", "us-east-1")
    with pytest.raises(InvalidInput, match="use a deployment of one region"):
        start(fleet)
    fleet.regions, fleet.serves = ("us-east-1",), rows.version("2", nodes=1).reference
    with pytest.raises(InvalidInput, match="name the version that it serves"):
        start(fleet)


def test_a_second_search_of_a_deployment_waits_for_nobody(fleet: Fleet) -> None:
    start(fleet)
    with pytest.raises(Conflict, match="is running"):
        start(fleet)


def test_a_rollout_that_fails_takes_a_configuration_out_and_the_search_goes_on(fleet: Fleet) -> None:
    row = start(fleet)
    search_advance(row, now=NOW)
    fleet.answer = Serving(ServingState.REFUSED, "its rollout is failed: 1 failed start")
    for _ in range(2):
        search_advance(row, now=NOW)
        ModelVersion.objects.filter(state="draft").update(state="validated")
    fleet.answer = None
    row = run(row)
    refused = [reason for standing, reason in standings(row).values() if standing is Standing.REFUSED]
    assert refused == ["its rollout is failed: 1 failed start"]
    assert row.state == "done"


def test_a_draft_that_is_not_valid_takes_a_configuration_out(fleet: Fleet) -> None:
    row = start(fleet)
    for _ in range(2):
        search_advance(row, now=NOW)
    draft = ModelVersion.objects.get(state="draft")
    draft.validations.update(state=ValidationState.FAILED.value, reason="no golden prompt")
    search_advance(row, now=NOW)
    assert [one for one in standings(row).values() if one[0] is Standing.REFUSED] == [
        (Standing.REFUSED, f"{draft.reference} is not valid: no golden prompt")
    ]


def test_what_does_not_come_to_serve_is_not_waited_for_for_ever(fleet: Fleet) -> None:
    row = start(fleet, varied={"engine_options.max_num_seqs": [4]})
    fleet.answer = Serving(ServingState.MOVING, "0 of 1 cells are ready")
    run(row, most=6)
    row = run(row, minutes=SERVES_WITHIN.total_seconds() / 60 + 1, most=6)
    assert standings(row)[1][0] is Standing.REFUSED
    assert row.ends_as == "failed", "it waits for what it had"
    row = run(row, minutes=2 * SERVES_WITHIN.total_seconds() / 60 + 2, most=6)
    assert (row.state, "does not serve sim-70b@1 again" in row.reason) == ("failed", True)


def test_a_search_ends_at_its_limits_with_the_best_so_far(fleet: Fleet) -> None:
    row = run(start(fleet, most_trials=1))
    assert (row.state, SearchTrial.objects.count()) == ("done", 1)
    assert "after 1 trials, the limit of this search" in row.reason


def test_a_cancelled_one_measures_nothing_more_and_goes_back(fleet: Fleet) -> None:
    row = start(fleet)
    for _ in range(4):
        search_advance(row, now=NOW)
        ModelVersion.objects.filter(state="draft").update(state="validated")
    assert Benchmark.objects.get().state == "queued"
    search_cancel(search_id=row.pk, actor="bo", now=NOW)
    assert Benchmark.objects.get().state == "cancelled"
    row = run(row)
    assert (row.state, row.reason, fleet.serves) == ("cancelled", "cancelled by bo", fleet.version.reference)
    assert {standing for standing, _ in standings(row).values()} == {Standing.UNMEASURED}
    with pytest.raises(Conflict, match="cancelled"):
        search_cancel(search_id=row.pk, actor="bo", now=NOW)


def made_by(row: ConfigurationSearch) -> dict[str, tuple[str, str]]:
    """The versions that a search made, with states and reasons."""
    made = ModelVersion.objects.filter(version__contains=f"-s{row.pk}-")
    return {one.version: (one.state, one.reason) for one in made}


def test_of_the_versions_that_it_made_the_best_stays_and_each_other_is_retired_with_its_reason(fleet: Fleet) -> None:
    row = run(start(fleet, varied={"engine_options.max_num_seqs": [16, 48, 64], "max_concurrency": [64]}))
    assert row.best is not None
    assert row.best.version is not None
    fleet.version.refresh_from_db()
    assert (row.best.version.state, fleet.version.state) == ("validated", "released")
    others = {name: said for name, said in made_by(row).items() if name != row.best.version.version}
    assert others
    for state, reason in others.values():
        assert state == "retired"
        assert reason.startswith(f"retired by switchyard: {row} ended without choosing it: ")
        assert "s per chip at " in reason


def test_what_was_released_meanwhile_or_is_in_use_stays(fleet: Fleet) -> None:
    row = start(fleet, varied={"engine_options.max_num_seqs": [56, 60, 64]})
    while not row.ends_as:
        run(row, most=1)
        row.refresh_from_db()
    assert row.best is not None
    assert row.best.version is not None
    released, used = ModelVersion.objects.filter(version__contains=f"-s{row.pk}-").exclude(pk=row.best.version.pk)[:2]
    ModelVersion.objects.filter(pk=released.pk).update(state="released")
    other = rows.deployment("other")
    other.model_version = used
    other.save()
    row = run(row)
    states = {name: state for name, (state, _) in made_by(row).items()}
    assert (states[released.version], states[used.version]) == ("released", "validated")
    assert f"{used.reference} is in use by deployment other; it cannot be retired" in row.reason


def test_a_draft_that_never_was_valid_is_deleted_and_its_configuration_says_why(fleet: Fleet) -> None:
    row = start(fleet)
    for _ in range(2):
        search_advance(row, now=NOW)
    draft = ModelVersion.objects.get(state="draft")
    draft.validations.update(state=ValidationState.FAILED.value, reason="no golden prompt")
    search_advance(row, now=NOW)
    row = run(row)
    assert not ModelVersion.objects.filter(pk=draft.pk).exists()
    assert f"{draft.reference} is not valid: no golden prompt" in {reason for _, reason in standings(row).values()}


def test_the_version_that_is_searched_around_is_measured_as_it_is(fleet: Fleet) -> None:
    row = run(start(fleet, varied={"max_concurrency": [64]}))
    assert row.best is not None
    assert row.best.version == fleet.version
    assert ModelVersion.objects.filter(version__contains="-s").count() == 0


PAIRS = [4, {"prefill": 1, "decode": 3}, {"prefill": 2, "decode": 2}]


def test_cells_by_role_are_measured_of_one_version_and_it_has_those_that_it_had(fleet: Fleet) -> None:
    row = run(start(fleet, varied={"cells": PAIRS}))
    assert (row.state, fleet.cells) == ("done", 4)
    assert set(fleet.asked) == {fleet.version.reference}, "none of them is a version of its own"
    measured = set(SearchTrial.objects.filter(fidelity=0.25).values_list("candidate__number", flat=True))
    assert measured == {1, 2, 3}, "what cells of one ratio do says nothing of another"


def test_one_version_is_drafted_for_all_cells_that_it_is_measured_with(fleet: Fleet) -> None:
    row = run(start(fleet, varied={"engine_options.max_num_seqs": [48, 64], "cells": PAIRS[:2]}))
    assert row.state == "done"
    assert len(made_by(row)) == 2


def test_cells_that_are_apart_are_so_for_each_configuration_and_afterwards(fleet: Fleet) -> None:
    fleet.cells = PAIRS[1]
    row = start(fleet)
    assert row.cells_before == PAIRS[1]
    assert run(row).state == "done"
    assert fleet.cells == PAIRS[1]
    fleet.cells = 4
    assert start(fleet).cells_before is None


def test_more_cells_than_there_are_take_no_part(fleet: Fleet) -> None:
    row = start(fleet, varied={"cells": [5, *PAIRS]})
    assert row.candidates.get(number=1).refused == "cells=5 needs 5 cells, but the deployment has 4"
    search_cancel(search_id=row.pk, actor="bo", now=NOW)
    run(row)
    fleet.cells = None
    with pytest.raises(InvalidInput, match="follow its load"):
        start(fleet, varied={"cells": PAIRS})


def test_a_version_that_hands_over_nothing_has_mixed_cells_alone(fleet: Fleet) -> None:
    ModelVersion.objects.filter(pk=fleet.version.pk).update(parallelism={KIND: {"nodes": 2}})
    fleet.version.refresh_from_db()
    row = start(fleet, varied={"cells": PAIRS})
    assert ["cannot have prefill and decode cells" in one.refused for one in row.candidates.all()] == [
        False, True, True,
    ]  # fmt: skip


def test_a_process_that_is_killed_leaves_no_draft_that_nobody_knows(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = start(fleet)
    search_advance(row, now=NOW)

    class Killed:
        @property
        def objects(self) -> None:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("models_registry.benchmarks.services.search_runner.SearchCandidate", Killed())
        with pytest.raises(RuntimeError, match="killed"):
            search_advance(row, now=NOW)
    row = run(row)
    assert row.state == "done"
    assert not [one for one in standings(row).values() if one[0] is Standing.REFUSED]


def test_who_deletes_a_draft_has_it_drafted_again(fleet: Fleet) -> None:
    row = start(fleet)
    for _ in range(2):
        search_advance(row, now=NOW)
    ModelVersion.objects.filter(state="draft").delete()
    assert run(row).state == "done"
