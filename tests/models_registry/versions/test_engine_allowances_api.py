"""Engine options beyond the lists: allowed by an admin with a reason, or by two if the rule is on."""

from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from accounts.services.approval import approval_rule_set
from fleet.nodes.selectors import desired_for
from kernel import clock
from kernel.access import Role
from kernel.models import Event
from models_registry.versions.models import EngineAllowance, ModelVersion
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.fleet import rows
from tests.models_registry.rows import SIM, draft

pytestmark = pytest.mark.django_db

V1 = "/api/v1"
PRELOAD = {"engine": "sim", "name": "LD_PRELOAD", "why": "a faster allocator"}


@pytest.fixture
def ada() -> APIClient:
    return calls(make_user("ada", Role.ADMIN))


@pytest.fixture
def grace() -> APIClient:
    return calls(make_user("grace", Role.ADMIN))


def post(client: APIClient, path: str, body: dict[str, Any] | None = None) -> Any:
    return client.post(f"{V1}/{path}", body or {}, format="json")


def write_version(client: APIClient, **fields: Any) -> Any:
    return post(client, "model-versions", {"model": "toy", "version": "2", **SIM, **fields})


def test_no_operator_has_nodes_run_a_program() -> None:
    draft("1")
    oscar = calls(make_user("oscar", Role.OPERATOR))
    refused = write_version(oscar, engine_env={"PYTHONWARNINGS": "all:0:antigravity.x:0:0", "BROWSER": "sh -c id #%s"})
    assert rules(refused) == {"engine_env.PYTHONWARNINGS": "allowed"}
    assert rules(write_version(oscar, engine_options={"middleware": "os.system"})) == {
        "engine_options.middleware": "allowed"
    }
    assert post(oscar, "engine-allowances", PRELOAD).status_code == 403
    assert not ModelVersion.objects.filter(version="2").exists()


def test_an_admin_allows_one_name_for_one_engine_with_a_reason(ada: APIClient) -> None:
    draft("1")
    allowed = post(ada, "engine-allowances", PRELOAD).json()
    assert (allowed["name"], allowed["engine"], allowed["actor"]) == ("LD_PRELOAD", "sim", "ada")
    assert Event.objects.get(kind="engine_allowance.added").message.endswith("by ada: a faster allocator")
    assert write_version(ada, engine_env={"LD_PRELOAD": "/lib/x.so"}).status_code == 200
    assert post(ada, "engine-allowances", PRELOAD).status_code == 409


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({"why": ""}, {"why": "blank"}),
        ({"why": " x", "engine": "vlm"}, {"engine": "invalid_choice"}),
        ({"name": "a b"}, {"name": "name"}),
        ({"name": "PYTHONPATH"}, {"name": "allowed"}),
        ({"name": "SWITCHYARD_CELL_SECRET"}, {"name": "allowed"}),
        ({"name": "host"}, {"name": "allowed"}),
    ],
)
def test_what_cannot_be_allowed_is_named(ada: APIClient, fields: dict[str, str], broken: dict[str, str]) -> None:
    assert rules(post(ada, "engine-allowances", {**PRELOAD, **fields})) == broken
    assert not EngineAllowance.objects.exists()


def test_what_is_listed_needs_no_allowance(ada: APIClient) -> None:
    assert post(ada, "engine-allowances", {**PRELOAD, "name": "decode_step_ms"}).status_code == 409


def test_where_the_rule_is_on_a_second_admin_must_approve(ada: APIClient, grace: APIClient) -> None:
    approval_rule_set(name="widen-engine-options", required=True, actor="root", now=clock.now())
    waits = post(ada, "engine-allowances", PRELOAD)
    assert waits.status_code == 202
    assert not EngineAllowance.objects.exists()
    assert post(ada, f"approvals/{waits.json()['id']}/approve").status_code == 409
    assert post(grace, f"approvals/{waits.json()['id']}/approve").json()["state"] == "done"
    assert EngineAllowance.objects.get().actor == "ada"


def test_agents_are_told_what_was_allowed_and_no_more(ada: APIClient) -> None:
    post(ada, "engine-allowances", PRELOAD)
    post(ada, "engine-allowances", {**PRELOAD, "name": "--anything"})
    node = rows.node("n-00000001")
    cell = rows.cell("c", node)
    ModelVersion.objects.filter(pk=cell.model_version_id).update(engine_env={"LD_PRELOAD": "x", "BROWSER": "y"})
    assignment = desired_for([node.id])[node.id].assignment
    assert assignment is not None
    assert assignment.plan.widened == ("LD_PRELOAD",)


def test_an_allowance_is_taken_back(ada: APIClient) -> None:
    draft("1")
    number = post(ada, "engine-allowances", PRELOAD).json()["id"]
    assert ada.delete(f"{V1}/engine-allowances/{number}").json()["name"] == "LD_PRELOAD"
    assert rules(write_version(ada, engine_env={"LD_PRELOAD": "/lib/x.so"})) == {"engine_env.LD_PRELOAD": "allowed"}


def test_the_page_lists_allowances_and_lets_admins_add_and_withdraw_them() -> None:
    admin, viewer = Client(), Client()
    admin.force_login(make_user("ada", Role.ADMIN))
    viewer.force_login(make_user("vera", Role.VIEWER))
    assert admin.post("/settings/allowances/new/", PRELOAD).status_code == 302
    row = EngineAllowance.objects.get()
    for client, may in ((admin, True), (viewer, False)):
        page = client.get("/settings/allowances/").content.decode()
        assert "LD_PRELOAD" in page
        assert (f"/settings/allowances/{row.pk}/withdraw/" in page) is may
    assert viewer.post(f"/settings/allowances/{row.pk}/withdraw/").status_code == 403
    assert admin.post(f"/settings/allowances/{row.pk}/withdraw/").status_code == 302
    approval_rule_set(name="widen-engine-options", required=True, actor="ada", now=clock.now())
    answer = admin.post("/settings/allowances/new/", PRELOAD)
    assert (answer.status_code, answer["Location"]) == (302, "/settings/approvals/")
    assert not EngineAllowance.objects.exists()
