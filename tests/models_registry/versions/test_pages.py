"""The pages of models and their versions: content, and actions of operators."""

import json

import msgspec
import pytest
from django.contrib.auth.models import User
from django.test import Client

from engine_agent.protocol.load_messages import Load, SpeculationLoad
from fleet.deployments.models import Deployment
from fleet.nodes.models import NodeReport
from models_registry.artifacts.planner import ArtifactLimits
from models_registry.benchmarks.models import ConfigurationSearch, SearchCandidate
from models_registry.speculation.pages import GainRow, version_accepted, version_speculation
from models_registry.speculation.services import calibration_store
from models_registry.versions.models import ModelVersion, Validation
from models_registry.versions.services.validation import Slice, validation_start, validations_advance
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.benchmarks.test_benchmark import measured
from tests.models_registry.rows import DOCUMENT, STEP_COST, draft, stored, with_heads

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/models/toy@1/"


def act(action: str, **form: str) -> tuple[int, str]:
    """Post the action and follow; returns the status and text of the last response."""
    response = signed_in().post(f"{URL}ask/{action}/", form, follow=True)
    return response.status_code, response.text


def test_a_model_shows_its_versions_and_who_serves_them() -> None:
    rows.deployment()
    row = stored("released")
    draft("2")
    Deployment.objects.update(model_version=row)
    rows.cell("a", model_version=row)
    text = fragment(signed_in(), "/models/toy/", "model")
    assert '<a href="/deployments/sim-70b/">sim-70b</a>' in text
    assert '<a href="/models/toy@1/">1</a>' in text
    listed = fragment(signed_in(), "/models/toy/", "model-versions")
    assert listed.index("toy@2") < listed.index("toy@1")
    assert '<td class="number">1</td>' in listed


def test_a_model_without_versions_says_how_to_add_one() -> None:
    row = draft()
    model = row.model
    row.delete()
    assert f"/new/version/?model={model.name}" in fragment(signed_in(), f"/models/{model.name}/", "model-versions")


def test_a_model_shows_what_was_measured_of_its_versions() -> None:
    old, new = draft(), draft("2")
    measured(old, 8.0)
    measured(new, 6.0)
    measured(new, 3.0, slo="ttft=9,itl=9")
    shown = fragment(signed_in(), "/models/toy/?use=1000%2B150+within+ttft%3D500,itl%3D50", "model-benchmarks")
    assert "Best by goodput: toy@1 on local.cpu: 2 requests per second and chip" in shown
    assert shown.count("<tr>") == 3
    assert "data-figure" in shown
    newest = fragment(signed_in(), "/models/toy/", "model-benchmarks")
    assert newest.count("<tr>") == 2
    assert "toy@1" not in newest


def test_a_model_that_was_not_measured_says_how_to() -> None:
    draft()
    shown = fragment(signed_in(), "/models/toy/", "model-benchmarks")
    assert "switchyard bench run toy@VERSION --workload 1000+150" in shown


def test_a_model_shows_its_searches_with_the_reason_of_each_configuration() -> None:
    version = draft()
    search = ConfigurationSearch.objects.create(
        version=version, deployment="toy", region="r", instance_type="local.cpu", workload="10+10", slo="ttft=9,itl=9",
        varied={"max_concurrency": [4, 8]}, most_trials=9, most_hours=1, reason="waits for a rollout", actor="ada",
        created_at=NOW, seen_at=NOW,
    )  # fmt: skip
    for number, refused in ((1, ""), (2, "max_concurrency is 8; there is no memory for it")):
        SearchCandidate.objects.create(
            search=search, number=number, choice=[["max_concurrency", 4 * number]], refused=refused
        )
    shown = fragment(signed_in(), "/models/toy/", "model-searches")
    assert "waits for a rollout" in shown
    assert "there is no memory for it" in shown
    assert "to be measured at 25% of the length" in shown
    search.delete()
    assert "switchyard bench search toy@VERSION" in fragment(signed_in(), "/models/toy/", "model-searches")


def test_a_version_shows_what_it_says_and_what_a_cell_of_it_is() -> None:
    draft(context_length=4096)
    client = signed_in()
    assert "editable" in fragment(client, URL, "version")
    options = fragment(client, URL, "version-options")
    assert "engine_options.decode_step_ms" in options
    cells = fragment(client, URL, "version-cells")
    assert "local.cpu: 2 nodes" in cells
    assert "<li>--decode-step-ms 14</li>" in cells
    assert "2 + 2 =" in fragment(client, URL, "version-prompts")
    assert "version.drafted" in fragment(client, URL, "version-events")
    assert "No deployment or cell uses it" in fragment(client, URL, "version-runs")


def test_a_cell_that_cannot_be_made_says_why() -> None:
    draft(engine="vllm", engine_options={})
    assert "engine vllm needs artifact_uri" in fragment(signed_in(), URL, "version-cells")


def test_a_waiver_is_shown_in_the_place_of_prompts() -> None:
    draft(golden_prompts=[], golden_waiver="random weights answer nothing")
    assert "None. Waiver: random weights answer nothing" in fragment(signed_in(), URL, "version-prompts")
    ModelVersion.objects.update(golden_waiver="")
    assert "no waiver" in fragment(signed_in(), URL, "version-prompts")


def test_a_version_shows_what_its_guesses_are_worth() -> None:
    version = with_heads()
    assert "without a calibration" in fragment(signed_in(), URL, "version-speculation")
    calibration_store(version_id=version.pk, document=DOCUMENT, step_costs=[STEP_COST], actor="ada", now=NOW)
    text = fragment(signed_in(), URL, "version-speculation")
    assert "1: 2.00, 2: 2.50" in text
    assert "no guess makes chat 1.05 times as fast on local.cpu, even for one sequence" in text


def test_a_calibrations_figures_show_what_was_chosen_by_what_steps_cost() -> None:
    version = with_heads()
    calibration_store(version_id=version.pk, document=DOCUMENT, step_costs=[STEP_COST], actor="ada", now=NOW)
    view = version_speculation(version)
    tokens = {trace["name"]: (trace["x"], trace["y"]) for trace in json.loads(view.tokens_figure)["data"]}
    assert tokens["plan, chain"] == ([1, 2], [2.0, 2.5])
    assert tokens["plan, tree"][1][-1] > tokens["plan, chain"][1][-1] - 0.1
    (cost,) = view.costs
    plan = next(row for row in cost.rows if (row.task, row.batch) == ("plan", 1))
    assert plan.chosen == 2
    assert plan.gains == pytest.approx((1.0, 2.0 * 2 / (1 + 3**0.3), 2.5 / 3**0.3))
    ring = json.loads(cost.figure)["data"][-1]
    assert (ring["x"][0], ring["y"][0]) == (2, round(plan.gains[2], 3))
    assert (0, 1.0) in zip(ring["x"], ring["y"], strict=True), "chat guesses nothing"
    assert "Speed-up, by number of tokens" in fragment(signed_in(), URL, "version-speculation")


def test_what_cells_accepted_is_shown_beside_what_was_calibrated() -> None:
    version = with_heads()
    calibration_store(version_id=version.pk, document=DOCUMENT, step_costs=[], actor="ada", now=NOW)
    rows.cell("c", rows.node("n-a"), rows.node("n-b"), model_version=version)
    load = msgspec.to_builtins(Load(speculation=SpeculationLoad(60.0, 500, 1000, 700)))
    NodeReport.objects.filter(node="n-a").update(cell="c", load=load, last_seen_at=NOW)
    (row,) = version_accepted(version, NOW)
    assert (row.drafts, row.guessed, row.tokens, row.is_low) == (500, 2.0, 2.4, False)
    assert dict(row.expected) == {"plan": pytest.approx(2.5), "chat": pytest.approx(1.05, abs=0.01)}
    assert version_accepted(stored("released", "2"), NOW) == ()
    text = fragment(signed_in(), "/models/toy@2/", "version-accepted")
    assert "No cell of this version speculated in the last hour." in text


def test_a_long_row_of_gains_tells_some_sizes_and_the_chosen_one() -> None:
    row = GainRow("plan", 1, tuple(map(float, range(40))), chosen=26)
    assert [size for size, _ in row.told] == [1, 2, 4, 8, 16, 26, 32]


def test_a_version_that_guesses_nothing_says_so() -> None:
    stored("released")
    assert "This version does not speculate." in fragment(signed_in(), URL, "version-speculation")


def test_where_a_version_runs_is_counted_by_state() -> None:
    row = stored("released")
    rows.deployment()
    Deployment.objects.update(model_version=row)
    for number, state in enumerate(("ready", "ready", "lost", "stopped")):
        rows.cell(f"cell-{number}", model_version=row, state=state)
    text = fragment(signed_in(), URL, "version-runs")
    assert "2 ready" in text
    assert "1 lost" in text
    assert "stopped" not in text
    assert "Wanted by" in text


def test_progress_of_a_validation_is_shown() -> None:
    validation_start(version_id=draft().pk, actor="ada", now=NOW)
    Validation.objects.update(files_total=9, files_done=3, bytes_total=2**31, bytes_done=2**30)
    text = fragment(signed_in(), URL, "version-validation")
    assert '<progress max="100" value="50"' in text
    assert "3 of 9 files" in text
    assert "ask/validate/" not in fragment(signed_in(), URL, "version")


def test_a_version_is_validated_released_and_retired_from_its_page() -> None:
    draft()
    assert act("validate")[0] == 200
    validations_advance(Slice((), ArtifactLimits()))
    validation = fragment(signed_in(), URL, "version-validation")
    assert "engine sim needs no artifact" in validation
    assert "possible" in validation
    assert "Released by operator: a week on canaries." in act("release", why="a week on canaries")[1]
    text = act("retire", why="superseded", confirm="toy@1")[1]
    assert "Retired by operator: superseded." in text
    assert "Not for a version that is retired." in text


def test_a_draft_is_deleted_from_its_page_by_its_name() -> None:
    draft()
    status, text = act("delete", confirm="toy@2")
    assert (status, "Type toy@1 to confirm; you typed &#x27;toy@2&#x27;." in text) == (409, True)
    assert "No versions yet." in act("delete", confirm="toy@1")[1]
    assert not ModelVersion.objects.exists()


def test_a_refusal_says_why() -> None:
    draft()
    status, text = act("release", why="now")
    assert status == 409
    assert "toy@1 is draft; release needs one that is validated." in text


def test_a_version_in_use_can_be_neither_retired_nor_deleted() -> None:
    rows.deployment()
    Deployment.objects.update(model_version=stored("released"))
    text = fragment(signed_in(), URL, "version")
    assert "ask/retire/" not in text
    assert "In use by deployment sim-70b" in text


@pytest.mark.parametrize("path", ["toy@9/ask/release/", "toy@1/ask/explode/"])
def test_an_unknown_version_or_action_is_not_found(path: str) -> None:
    draft()
    assert signed_in().post(f"/models/{path}").status_code == 404


def test_only_signed_in_users_may_act_and_only_by_a_form() -> None:
    stored("validated")
    path = f"{URL}ask/release/"
    assert Client().post(path, {"why": "x"}).headers["Location"].startswith("/login/")
    assert signed_in().get(path).status_code == 200
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(User.objects.get(username="operator"))
    assert careful.post(path, {"why": "x"}).status_code == 403
    assert ModelVersion.objects.get().state == "validated"


def test_a_version_of_several_instance_types_is_shown_by_type() -> None:
    on_p5 = {"engine": "vllm", "artifact_uri": "file:///llama", "max_concurrency": 4}
    draft("1", parallelism={"local.cpu": {"nodes": 2}, "p5.48xlarge": {"tp": 2}}, by_type={"p5.48xlarge": on_p5})
    text = fragment(signed_in(), URL, "version-cells")
    for expected in ("<td>sim</td>", "<td>vllm</td>", "2 nodes", "tp 2", '<td class="number">4</td>', "file:///llama"):
        assert expected in text
    assert "by_type.p5.48xlarge.max_concurrency" in fragment(signed_in(), URL, "version-options")


def test_two_versions_are_shown_side_by_side() -> None:
    draft("1")
    draft("2", engine_options={"decode_step_ms": 12.5, "seed": 7})
    text = fragment(signed_in(), "/models/toy@2/diff/?against=toy@1", "version-diff")
    for expected in ("differs", "engine_options.decode_step_ms", "12.5", "not set", "--decode-step-ms", "identical"):
        assert expected in text
    assert '<th scope="col">1</th><th scope="col">2</th>' in text


def test_versions_that_are_the_same_say_so() -> None:
    draft("1")
    draft("2")
    text = fragment(signed_in(), "/models/toy@2/diff/?against=toy@1", "version-diff")
    assert "Same engine, artifacts and prompts." in text
    assert "Same nodes, degrees and engine arguments." in text


def test_a_comparison_without_another_version_offers_them() -> None:
    draft("1")
    assert "toy has no other version" in fragment(signed_in(), "/models/toy@1/diff/", "version-diff")
    draft("2")
    assert "Select a version to compare with" in fragment(signed_in(), "/models/toy@1/diff/", "version-diff")
    assert signed_in().get("/models/toy@1/diff/?against=toy@9").status_code == 404
