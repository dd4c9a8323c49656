"""The wizard of regions: local, machines and AWS, its mistakes, and who may use it."""

import pytest
from django.test import Client

from fleet.clouds.models import CloudRegion
from fleet.regions.models import Region
from kernel.access import Role
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/new/region/"
SPARES = {"spares-0-type": "local.cpu", "spares-0-warm": "3", "spares-0-repair_only": "1"}


def test_a_region_of_machines_is_created_once() -> None:
    typed = {"name": "eu-west-1", "provider": "machines", "ingress_url": "http://eu.example.com:8080", **SPARES}
    client = signed_in()
    review = client.post(URL, {**typed, "go": "review"}).text
    assert "kind: Region" in review
    assert "switchyard apply -f eu-west-1.yaml" in " ".join(review.split())
    assert not Region.objects.exists()
    for _ in range(2):
        assert client.post(URL, {**typed, "go": "apply"}).headers["Location"] == "/regions/eu-west-1/"
    region = Region.objects.get()
    assert (region.provider, region.spares) == ("machines", {"local.cpu": {"warm": 3, "repair_only": 1}})


@pytest.mark.parametrize("provider", ["aws", "ecs"])
def test_a_region_in_aws_needs_its_stack_which_never_changes(provider: str) -> None:
    client, typed = signed_in(), {"name": "eu-west-1", "provider": provider}
    refused = client.post(URL, {**typed, "go": "apply"})
    assert refused.status_code == 409
    assert "needs the name of its stack" in refused.text.partition('id="error-stack"')[2].partition("</p>")[0]
    assert client.post(URL, {**typed, "stack": "yard", "go": "apply"}).status_code == 302
    cloud = CloudRegion.objects.get()
    assert (cloud.stack, cloud.aws_region, cloud.region.provider) == ("yard", "eu-west-1", provider)
    other = client.post(URL, {**typed, "stack": "other", "go": "apply"})
    assert "create another region" in other.text
    assert CloudRegion.objects.get().stack == "yard"


def test_alarms_replace_machines_where_the_box_of_their_row_is_checked() -> None:
    typed = {"name": "eu-west-1", "provider": "ecs", "stack": "yard", "go": "apply"}
    alarms = {"alarms-0-prefix": "node-", "alarms-1-prefix": "dead-", "alarms-1-replaces": "on"}
    client = signed_in()
    shown = client.post(URL, {**typed, **alarms, "go": "review"}).text
    box = shown.partition('name="alarms-1-replaces"')[2].partition(">")[0]
    assert ('type="checkbox"' in box, "checked" in box) == (True, True)
    assert client.post(URL, {**typed, **alarms}).status_code == 302
    named = [{"prefix": "node-", "replaces": False}, {"prefix": "dead-", "replaces": True}]
    assert Region.objects.get().alarms == named


def test_a_taken_name_is_never_changed() -> None:
    rows.region("us-east-1", provider="local")
    before = Region.objects.values().get()
    response = signed_in().post(URL, {"name": "us-east-1", "provider": "local", "position": "7", "go": "apply"})
    assert "-east-1 exists already and differs" in response.text
    assert Region.objects.values().get() == before


@pytest.mark.parametrize(
    ("field", "text", "error"),
    [
        ("name", "EU <b>west</b>", "letters, digits, - and _"),
        ("name", "e" * 100_001, "limit is 100000"),
        ("provider", "mars", "unknown provider"),
        ("position", "-1", "greater than or equal to 0"),
        ("ingress_url", "javascript:alert(1)", "valid url"),
        ("stack", "yard", "only a region of provider aws"),
        ("spares-0-type", "<script>alert(1)</script>", "script"),
    ],
)
def test_mistakes_are_named_and_what_was_typed_stays(field: str, text: str, error: str) -> None:
    typed = {"name": "eu-west-1", "provider": "local", "position": "5", "spares-0-warm": "1", field: text}
    if not field.startswith("spares"):
        del typed["spares-0-warm"]
    response = signed_in().post(URL, {**typed, "go": "apply"})
    assert response.status_code == 409
    name = field.partition("-")[0]
    at_input = response.text.partition(f'id="error-{name}"')[2].partition("</p>")[0]
    assert error in at_input.casefold()
    assert "<b>" not in response.text
    assert "<script>alert" not in response.text
    assert 'value="5"' in response.text or field == "position"
    assert not Region.objects.exists()


def test_viewers_see_why_not() -> None:
    viewer = Client()
    viewer.force_login(make_user("vera", Role.VIEWER))
    assert "This needs the operator role." in viewer.get("/regions/").text
    assert 'href="/new/region/"' in signed_in().get("/regions/").text
    assert viewer.post(URL, {"name": "eu-west-1", "go": "apply"}).status_code == 403
    assert not Region.objects.exists()
