"""The wizard of deployments: what it offers first, what fits where, and what it makes."""

import re
from typing import Any

import pytest
from django.test import Client

from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.rollouts.models import Rollout
from kernel.access import Role
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import VersionState
from tests.controlplane.access.callers import granted, make_user
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
URL = "/new/deployment/"
CHECK = {"HX-Request": "true", "HX-Target": "wizard-check"}
TYPED = {
    "name": "chat",
    "model_version": "sim-70b@1",
    "instance_types": ["local.cpu"],
    "regions-0-region": "us-east-1",
    "regions-0-cells": "2",
}


@pytest.fixture(autouse=True)
def fleet() -> None:
    InstanceType.objects.create(name="local.cpu", accelerator="cpu", price_per_hour=0.5)
    rows.region("eu-west-1", position=1)
    rows.version("1", state=VersionState.RELEASED)
    for name in ("n-00000001", "n-00000002", "n-00000003"):
        rows.node(name)


def posted(go: str, client: Client | None = None, **changed: Any) -> Any:
    return (client or signed_in()).post(URL, {**TYPED, **changed, "go": go})


def test_the_form_begins_with_what_can_be_applied() -> None:
    shown = signed_in().get(URL).text
    assert 'name="name" type="text" value="sim-70b"' in shown
    assert 'value="local.cpu" checked' in shown
    assert "possible" in shown
    assert "1 cell on the preferred type costs $1.00 an hour" in shown


def test_it_says_what_fits_where() -> None:
    shown = signed_in().post(URL, TYPED, headers=CHECK).text
    row = shown.partition('<td class="key">local.cpu</td>')[2].partition("</tr>")[0]
    assert re.findall(r'number"[^>]*>([^<]*)<', row) == ["2", "3", "1", "1.00", "not measured"]
    assert "2 cells on the preferred type cost $2.00 an hour" in shown


def test_a_review_shows_the_plan_and_the_predicted_effect() -> None:
    shown = posted("review").text
    assert "Deployment chat does not exist" in shown
    assert "Predicted effect on chat" in shown
    assert not Deployment.objects.exists()


def test_it_is_made_once_with_ranges_and_an_objective() -> None:
    fields = {"regions-1-region": "eu-west-1", "regions-1-cells": "2-8", "slo.ttft_ms": "1500", "preemptible": ""}
    client = signed_in()
    assert posted("apply", client, **fields).headers["Location"] == "/deployments/chat/"
    assert posted("apply", client, **fields).headers["Location"] == "/deployments/chat/"
    made = Deployment.objects.get()
    assert made.slo == {"ttft_ms": 1500}
    places = DeploymentRegion.objects.order_by("region_id").values_list("region_id", "cells", "cells_min", "cells_max")
    assert list(places) == [("eu-west-1", 2, 2, 8), ("us-east-1", 2, None, None)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "field", "error"),
    [
        ({"regions-0-cells": "many"}, "regions", "write 3, 2-8 or 1p+3d"),
        ({"regions-0-cells": "99999999999"}, "regions", "cells"),
        ({"regions-0-region": "mars"}, "regions", "mars"),
        ({"regions-7-region": "us-east-1", "regions-7-cells": "1"}, "regions", "us-east-1 is listed twice"),
        ({"regions-0-cells": "0"}, "regions", "at least 1"),
        ({"instance_types": ["x.large"]}, "instance_types", "x.large"),
        ({"model_version": "sim-70b@9"}, "model_version", "nknown model version"),
        ({"name": "<b>"}, "name", "letters, digits"),
        ({"slo.ttft_ms": "-1"}, "slo-ttft_ms", "from 1 to"),
        ({"slo.ttft_ms": "1e999"}, "slo-ttft_ms", "ttft"),
        ({"update_policy": '{"bake": 1}'}, "update_policy", "bake"),
        ({"priority": "70000"}, "priority", "less than or equal"),
    ],
)
def test_a_mistake_is_named_at_its_field(changed: dict[str, Any], field: str, error: str) -> None:
    response = posted("apply", None, **{"drain_deadline_s": "77", **changed})
    assert response.status_code == 409
    assert error in response.text.partition(f'<p id="error-{field}"')[2].partition("</p>")[0]
    assert 'value="77"' in response.text
    assert not Deployment.objects.exists()


def test_a_deployment_that_exists_is_neither_scaled_nor_rolled_out() -> None:
    rows.version("2", state=VersionState.RELEASED)
    posted("apply")
    response = posted("apply", None, **{"model_version": "sim-70b@2", "regions-0-cells": "3"})
    assert "Deployment chat exists already and differs" in response.text
    assert DeploymentRegion.objects.get().cells == 2
    assert not Rollout.objects.exists()


@pytest.mark.long
def test_a_validated_version_needs_the_tick() -> None:
    rows.version("3", state=VersionState.VALIDATED)
    assert 'name="allow_unreleased" value="on" checked' in signed_in().get(f"{URL}?model_version=sim-70b@3").text
    assert "set allow_unreleased" in posted("review", model_version="sim-70b@3").text
    assert posted("apply", model_version="sim-70b@3", allow_unreleased="on").status_code == 302


def test_operators_of_one_deployment_make_no_other() -> None:
    client = Client()
    for user in (granted("ada", "chat"), make_user("vera", Role.VIEWER)):
        client.force_login(user)
        assert posted("apply", client).status_code == 403
        assert client.get(URL).status_code == 403
    assert "This needs the operator role." in client.get("/deployments/").text
    assert not Deployment.objects.exists()
