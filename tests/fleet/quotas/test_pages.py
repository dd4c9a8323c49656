"""The wizard of quotas: it sets one once, its mistakes keep what was typed, and who may use it."""

import pytest
from django.test import Client

from fleet.quotas.models import Quota
from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/new/quota/"
TYPED = {"team": "search", "instance_type": "local.cpu", "machines": "4"}


def test_a_quota_is_set_once_and_changed_from_the_list() -> None:
    client = signed_in()
    assert "name: search:local.cpu\n" in client.post(URL, {**TYPED, "go": "review"}).text
    for _ in range(2):
        response = client.post(URL, {**TYPED, "borrow_most": "2", "go": "apply"})
        assert response.headers["Location"] == "/deployments/#quotas"
    assert Event.objects.filter(kind="quota.set").count() == 1
    shown = fragment(client, "/deployments/", "quotas")
    link = shown.partition(f'href="{URL}?')[2].partition('"')[0].replace("&amp;", "&")
    assert 'value="2"' in client.get(f"{URL}?{link}").text
    client.post(URL, {**TYPED, "machines": "6", "go": "apply"})
    assert (Quota.objects.get().machines, Quota.objects.get().borrow_most) == (6, None)


def test_a_quota_of_a_region_is_a_separate_one() -> None:
    rows.region("us-east-1")
    signed_in().post(URL, {**TYPED, "region": "us-east-1", "go": "apply"})
    assert Quota.objects.get().name == "search:local.cpu:us-east-1"
    above = signed_in().post(URL, {**TYPED, "machines": "3", "go": "apply"})
    assert "state 4 at least" in above.text.partition('id="error-machines"')[2].partition("</p>")[0]


@pytest.mark.parametrize(
    ("field", "text", "at", "error"),
    [
        ("team", "<b>x</b>", "team", "TEAM:TYPE"),
        ("team", "x" * 100_001, "team", "the limit is 100000"),
        ("instance_type", "mars", "instance_type", "mars"),
        ("region", "mars", "region", "unknown region"),
        ("machines", "-1", "machines", "greater than or equal to 0"),
        ("machines", "9" * 30, "machines", "less than or equal to"),
        ("borrow_most", "some", "borrow_most", "valid integer"),
    ],
)
def test_a_mistake_is_named_at_its_input_and_stays(field: str, text: str, at: str, error: str) -> None:
    response = signed_in().post(URL, {**TYPED, field: text, "go": "apply"})
    assert response.status_code == 409
    assert error.casefold() in response.text.partition(f'id="error-{at}"')[2].partition("</p>")[0].casefold()
    assert "<b>x" not in response.text
    assert 'value="4"' in response.text or field == "machines"
    assert not Quota.objects.exists()


def test_viewers_see_why_not() -> None:
    viewer = Client()
    viewer.force_login(make_user("vera", Role.VIEWER))
    shown = fragment(viewer, "/deployments/", "quotas")
    assert "This needs the operator role." in shown
    assert f'href="{URL}' not in shown
    assert viewer.post(URL, {**TYPED, "go": "apply"}).status_code == 403
    assert not Quota.objects.exists()
