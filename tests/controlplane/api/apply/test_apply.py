"""Documents over HTTP: preview and apply have the same steps, all or none are applied, and never on a state that was
not reviewed.
"""

from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accounts.models import Approval, ApprovalRule
from controlplane.api.apply.documents import documents_of
from controlplane.api.apply.execution import Requester, documents_preview
from controlplane.api.apply.view import PreviewDocumentsSerializer, deployment_described
from controlplane.cli.documents import read_documents
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.demo import demo_seed
from fleet.faults.models import FaultRule
from fleet.faults.planning.views import SETTABLE_RULES
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from kernel.access import Role
from kernel.models import Event
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import Model, ModelVersion
from tests.controlplane.access.callers import calls, granted, make_user
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows
from traffic.region_shares.models import TrafficRule

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/apply"


def document(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "switchyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


def previewed(*documents: dict[str, Any]) -> Any:
    return bearer().post(f"{URL}/preview", {"documents": list(documents)}, format="json")


def applied(*documents: dict[str, Any], **more: Any) -> Any:
    return bearer().post(URL, {"documents": list(documents), **more}, format="json")


def a_whole_fleet() -> list[dict[str, Any]]:
    places = [{"region": "eu-west-1", "cells": 2}]
    return [
        document("FaultRule", "slow", mode="shadow"),
        document("TrafficPolicy", "chat", cost={"eu-west-1": 0.5}),
        document("Deployment", "chat", model_version="sim-70b@1", instance_types=["local.cpu"], regions=places),
        document("Model", "tiny", description="a small one"),
        document("ModelVersion", "tiny@1", engine="sim", parallelism={"local.cpu": {"nodes": 1}}),
        document("Region", "eu-west-1", spares={"local.cpu": 1}),
    ]


def actions(answer: Any) -> list[tuple[str, str, str]]:
    assert answer.status_code == 200, answer.json()
    return [(step["kind"], step["name"], step["action"]) for step in answer.json()["steps"]]


def test_a_whole_fleet_is_made_in_the_order_in_which_the_one_needs_the_other() -> None:
    rows.version()
    InstanceType.objects.create(name="local.cpu", accelerator="cpu")
    expected = [
        ("Region", "eu-west-1", "create"),
        ("Model", "tiny", "create"),
        ("ModelVersion", "tiny@1", "create"),
        ("Deployment", "chat", "create"),
        ("TrafficPolicy", "chat", "change"),
        ("FaultRule", "slow", "change"),
    ]
    plan = previewed(*a_whole_fleet())
    assert actions(plan) == expected
    assert not Region.objects.exists()
    assert not Event.objects.exists()

    done = applied(*a_whole_fleet(), revision=plan.json()["revision"], why="opening Europe")
    assert actions(done) == expected
    assert done.json()["applied"]
    assert Region.objects.get().spares == {"local.cpu": 1}
    assert Model.objects.get(name="tiny").description == "a small one"
    assert ModelVersion.objects.get(model="tiny").state == "draft"
    assert Deployment.objects.get().model_version.reference == "sim-70b@1"
    assert dict(DeploymentRegion.objects.values_list("region_id", "cells")) == {"eu-west-1": 2}
    assert TrafficRule.objects.get().policy().cost == {"eu-west-1": 0.5}
    assert FaultRule.objects.get().mode == "shadow"
    assert Event.objects.filter(actor="operator").count() == len(expected)

    again = applied(*a_whole_fleet())
    assert actions(again) == []
    assert len(again.json()["unchanged"]) == len(expected)


def test_a_plan_tells_what_would_become_of_what_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.clock.now", lambda: rows.NOW)
    rows.cell("sim-70b-us-east-1-1", rows.node("n-1"), rows.node("n-2"))
    rows.node("n-3")
    rows.node("n-4")
    answer = previewed(document("Deployment", "sim-70b", regions=[{"region": "us-east-1", "cells": 2}]))
    assert actions(answer) == [("Deployment", "sim-70b", "scale")]
    (effect,) = answer.json()["effects"]
    assert effect["deployment"] == "sim-70b"
    (place,) = effect["forecast"]["places"]
    assert (place["wanted"], place["ready_now"], place["ready_then"]) == (2, 1, 2)
    assert DeploymentRegion.objects.get().cells == 1


def test_a_rollout_is_foretold_and_then_started() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-1"), rows.node("n-2"))
    rows.version("2")
    wanted = document("Deployment", "sim-70b", model_version="sim-70b@2", regions=[{"region": "us-east-1", "cells": 2}])
    plan = previewed(wanted)
    assert [action for *_, action in actions(plan)] == ["scale", "roll_out"]
    assert not Rollout.objects.exists()
    applied(wanted, revision=plan.json()["revision"], why="faster")
    rollout = Rollout.objects.get()
    assert (rollout.to_version.reference, rollout.why) == ("sim-70b@2", "faster")
    assert actions(applied(wanted)) == [], "it is on its way there"


def test_nothing_is_done_on_a_state_that_nobody_looked_at() -> None:
    rows.deployment()
    wanted = document("Deployment", "sim-70b", regions=[{"region": "us-east-1", "cells": 2}])
    revision = previewed(wanted).json()["revision"]
    DeploymentRegion.objects.update(cells=3)
    answer = applied(wanted, revision=revision)
    assert answer.status_code == 409
    assert "have changed since the plan was made" in answer.json()["detail"]
    assert DeploymentRegion.objects.get().cells == 3


def test_all_or_nothing_is_done_and_every_objection_is_named() -> None:
    rows.deployment()
    answer = applied(
        document("FaultRule", "slow", mode="off"),
        document("Deployment", "sim-70b", model_version="sim-70b@9"),
        document("Region", "eu-west-1", spares={"abacus": 1}),
    )
    assert rules(answer) == {
        "documents.1.spec.model_version": "exists",
        "documents.2.spec.spares.abacus": "exists",
    }
    assert not FaultRule.objects.exists()
    assert not Region.objects.filter(name="eu-west-1").exists()


@pytest.mark.parametrize(
    ("wrong", "path", "rule", "message"),
    [
        (document("Deployment", "a", cells=2), "documents.0.spec.cells", "unknown", "allowed: serving_class, "),
        (document("Fleet", "a"), "documents.0.kind", "invalid_choice", "Fleet"),
        ({**document("Model", "a"), "apiVersion": "v2"}, "documents.0.apiVersion", "invalid_choice", "v2"),
        ({**document("Model", "a"), "status": {}}, "documents.0.status", "unknown", "allowed: apiVersion, kind"),
        (document("ModelVersion", "sim-70b"), "documents.0.metadata.name", "name", "has the form model@version"),
        (document("FaultRule", "slo", mode="on"), "documents.0.metadata.name", "exists", "rules are: hard_signature"),
        (
            document("Deployment", "a", regions=[{"region": "x", "cells": "two"}]),
            "documents.0.spec.regions.0.cells",
            "invalid",
            "integer",
        ),
        (
            document("Deployment", "sim-70b", slo={"ttft": 1}),
            "documents.0.spec.slo.ttft",
            "objective",
            "known: availability, ttft_ms",
        ),
        (
            document("ModelVersion", "m@1", engine="sim", engine_options={"a": "\x00"}),
            "documents.0.spec.engine_options.a",
            "storable",
            "NUL",
        ),
        (document("ModelVersion", "m@1", quantization=deep(40)), "", "parse_error", "deeper than 32"),
        (document("Region", "new\nline"), "documents.0.metadata.name", "name", "letters, digits"),
        (document("TrafficPolicy", "a", cost={}), "", "", ""),
        (document("TrafficPolicy", "a", load_bound=2.0), "documents.0.spec", "exists", "deployment 'a' does not exist"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(wrong: dict[str, Any], path: str, rule: str, message: str) -> None:
    rows.deployment()
    answer = previewed(wrong)
    if not rule:
        assert actions(answer) == []
        return
    assert rules(answer) == {path: rule}
    assert message in answer.json()["errors"][0]["message"]


def test_a_version_that_is_no_draft_any_more_keeps_its_meaning() -> None:
    rows.version()
    answer = previewed(document("ModelVersion", "sim-70b@1", context_length=4096))
    assert rules(answer) == {"documents.0.spec.context_length": "immutable"}
    assert "based_on: sim-70b@1" in answer.json()["errors"][0]["message"]


def test_a_dry_run_is_a_preview() -> None:
    rows.deployment()
    wanted = document("Deployment", "sim-70b", regions=[{"region": "us-east-1", "cells": 0}])
    answer = applied(wanted, dry_run=True)
    assert actions(answer) == [("Deployment", "sim-70b", "scale")]
    assert not answer.json()["applied"]
    assert DeploymentRegion.objects.get().cells == 1


def test_a_rollout_that_needs_two_person_approval_waits() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-1"), rows.node("n-2"))
    rows.deployment(where="us-west-2")
    rows.version("2")
    ApprovalRule.objects.create(action="roll-out-everywhere", required=True, actor="ada", changed_at=rows.NOW)
    wanted = document("Deployment", "sim-70b", model_version="sim-70b@2")
    (foreseen,) = previewed(wanted).json()["waiting"]
    assert (foreseen["approval"], Approval.objects.exists()) == (None, False)
    (waiting,) = applied(wanted).json()["waiting"]
    assert waiting == {"approval": Approval.objects.get().pk, "summary": foreseen["summary"]}
    assert not Rollout.objects.exists()


def test_the_example_describes_the_demo_fleet() -> None:
    demo_seed(weights=None, ingress_port=8080, now=rows.NOW)
    example = Path(__file__).resolve().parents[4] / "deploy" / "examples" / "fleet.yaml"
    documents = read_documents([str(example)]).documents
    expected = [
        ("Region", "us-east-1", "change"),
        ("ModelVersion", "sim-70b@3-quiet", "create"),
        ("Deployment", "sim-70b", "change"),
        ("Deployment", "sim-70b", "scale"),
        ("TrafficPolicy", "sim-70b", "change"),
        ("FaultRule", "slow", "change"),
    ]
    assert actions(applied(*documents)) == expected
    assert actions(applied(*documents)) == []
    draft = ModelVersion.objects.get(version="3-quiet")
    assert (draft.max_concurrency, draft.engine_options["decode_step_ms"]) == (24, 12.5)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([document("Deployment", "a"), document("TrafficPolicy", "a")], "a"),
        ([document("Deployment", "a"), document("Deployment", "b")], ""),
        ([document("Deployment", "a"), document("FaultRule", "slow")], ""),
        ([document("Region", "a")], ""),
        ([{"kind": "Deployment", "metadata": {"name": ["a"]}}], ""),
        ([3], ""),
        ("a", ""),
    ],
)
def test_who_may_change_one_deployment_may_describe_that_one(body: Any, named: str) -> None:
    assert deployment_described({"documents": body}) == named


def test_a_grant_for_a_deployment_opens_its_documents_and_no_others() -> None:
    rows.deployment()
    rows.deployment("other")
    client = calls(granted("ada", "sim-70b"))
    places = [{"region": "us-east-1", "cells": 2}]
    for name, status in (("sim-70b", 200), ("other", 403)):
        body = {"documents": [document("Deployment", name, regions=places)]}
        assert client.post(URL, body, format="json").status_code == status
        assert client.post(f"{URL}/preview", body, format="json").status_code == 200


def test_a_repeated_request_is_done_once() -> None:
    rows.deployment()
    client = bearer()
    wanted = document("Deployment", "sim-70b", regions=[{"region": "us-east-1", "cells": 2}])
    body, key = {"documents": [wanted]}, {"Idempotency-Key": "once"}
    first = client.post(URL, body, format="json", headers=key)
    assert client.post(URL, body, format="json", headers=key).json() == first.json()


def test_cells_by_role_are_foretold_applied_and_then_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.clock.now", lambda: rows.NOW)
    rows.deployment(cells=2, nodes=1)
    for number in range(2):
        rows.cell(f"sim-70b-us-east-1-{number}", rows.node(f"n-{number}"))
    wanted = document("Deployment", "sim-70b", regions=[{"region": "us-east-1", "cells": {"prefill": 1, "decode": 1}}])
    (effect,) = previewed(wanted).json()["effects"]
    (place,) = effect["forecast"]["places"]
    assert (place["wanted"], place["ready_now"], place["ready_then"]) == (2, 2, 2)
    assert actions(applied(wanted)) == [("Deployment", "sim-70b", "scale")]
    assert DeploymentRegion.objects.get().split == RoleSplit(prefill=1, decode=1)
    assert actions(applied(wanted)) == []
    regions = [{"region": "us-east-1", "cells": {"prefill": 1, "decode": 1, "mixed": 0}}]
    assert actions(applied(document("Deployment", "sim-70b", regions=regions))) == []


def test_a_kind_that_only_admins_change_is_refused_to_operators_in_documents_as_well() -> None:
    body = {"documents": [document("Model", "m"), document("FaultRule", SETTABLE_RULES[0].value, mode="off")]}
    operator = calls(make_user("olga", Role.OPERATOR))
    assert operator.post(f"{URL}/", body, format="json").status_code == 403
    assert not Model.objects.exists()
    assert operator.post(f"{URL}/", {**body, "dry_run": True}, format="json").status_code == 200
    assert calls(make_user("ada", Role.ADMIN)).post(f"{URL}/", body, format="json").status_code == 200
    assert FaultRule.objects.get().mode == "off"


@pytest.mark.parametrize(
    ("kind", "spec", "each"),
    [
        ("Model", {"description": "new"}, 2),  # its row and its event
        ("Region", {"position": 4}, 3),  # and whether another region's ingresses have its names
        ("Deployment", {"scaling": {"mode": "act"}, "drain_deadline_s": 90}, 0),
        ("Deployment", {"regions": [{"region": "us-east-1", "cells": 4}]}, 0),
        ("Deployment", {"regions": [{"region": "us-east-1", "cells": {"min": 2, "max": 5}}], "priority": 7}, 0),
        ("TrafficPolicy", {"utilisation_cap": 0.7, "tested_concurrency": 9}, 0),
        ("Deployment", {"regions": [{"region": "us-east-1", "cells": 1}]}, 0),  # unchanged
    ],
)
def test_more_documents_take_more_queries_only_for_their_writes(kind: str, spec: dict[str, Any], each: int) -> None:
    counts = []
    for number in range(12):
        rows.deployment(f"{kind.lower()}-{number}")
    for documents in (2, 12):
        made = documents_of(valid([document(kind, f"{kind.lower()}-{number}", **spec) for number in range(documents)]))
        with CaptureQueriesContext(connection) as captured:
            documents_preview(documents=made, requester=Requester("ada", "", rows.NOW), with_fleet=False)
        counts.append(len(captured))
    assert counts[1] - counts[0] == 10 * each


def valid(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    checked = PreviewDocumentsSerializer(data={"documents": documents})
    checked.is_valid(raise_exception=True)
    return list(checked.validated_data["documents"])


def test_an_error_of_one_step_undoes_the_others_and_all_errors_are_listed() -> None:
    rows.deployment()
    lost = [{"region": "mars", "cells": 1}]
    wrong = applied(
        document("Model", "tiny"),
        document("Deployment", "sim-70b", regions=lost),
        document("TrafficPolicy", "unknown", cost={"us-east-1": 0.5}),
    )
    assert wrong.status_code == 400
    assert {rule["field"].partition(".spec")[0] for rule in wrong.json()["errors"]} == {"documents.1", "documents.2"}
    assert not Model.objects.filter(name="tiny").exists()
    assert not Event.objects.exists()
    assert applied(document("Model", "tiny")).status_code == 200
    assert Model.objects.filter(name="tiny").exists()
