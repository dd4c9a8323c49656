"""Image moves over HTTP."""

import pytest

from audit.models import AuditRecord
from fleet.clouds.models import CapacityPool, ImageMove
from kernel.models import Event
from tests.controlplane.api.client import bearer, rules
from tests.fleet.pools import TYPE, cloud_region, pool

pytestmark = pytest.mark.django_db

PATH = "/api/v1/image-moves"
NEWER = "ami-0123456789abcdef0"
ASK = {"region": "us-east-1", "instance_type": TYPE, "image": NEWER, "why": "a new driver"}


def test_a_move_is_asked_for_seen_and_taken_back_and_each_is_recorded() -> None:
    pool(0)
    client = bearer("ada")
    made = client.post(PATH, ASK, format="json").json()
    asked_at = made.pop("asked_at")
    assert made == {
        "id": ImageMove.objects.get().pk,
        "region": "us-east-1",
        "instance_type": TYPE,
        "image": NEWER,
        "state": "asked",
        "tone": "moving",
        "reason": "",
        "booted": [],
        "failed": [],
        "asked_by": "ada",
        "ended_at": None,
    }
    assert client.get(f"{PATH}/{made['id']}").json()["asked_at"] == asked_at
    assert CapacityPool.objects.get().next_image == "", "nothing moves before the cloud has said that there is one"
    assert client.post(PATH, ASK, format="json").status_code == 409, "one at a time"
    back = client.post(f"{PATH}/{made['id']}/back", {"why": "not today"}, format="json").json()
    assert (back["state"], back["reason"]) == ("refused", "cancelled before it began, requested by ada: not today")
    assert client.post(f"{PATH}/{made['id']}/back", {}, format="json").status_code == 409
    assert client.post(PATH, {**ASK, "image": ""}, format="json").status_code == 200
    actions = AuditRecord.objects.filter(outcome="done").order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["image-move.create", "image-move.back", "image-move.create"]
    assert list(Event.objects.order_by("pk").values_list("kind", flat=True)) == [
        "image.asked", "image.refused", "image.asked",
    ]  # fmt: skip


def test_a_move_that_runs_is_turned_round() -> None:
    pool(0)
    client = bearer()
    path = f"{PATH}/{client.post(PATH, ASK, format='json').json()['id']}"
    ImageMove.objects.update(state="rolling")
    assert client.post(f"{path}/back", {}, format="json").json()["state"] == "back"
    assert client.post(f"{path}/back", {}, format="json").status_code == 409
    assert [row["state"] for row in client.get(f"{PATH}?region=us-east-1&state=back").json()["results"]] == ["back"]
    assert client.get(f"{PATH}?instance_type=none").json()["results"] == []


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({**ASK, "image": "latest"}, {"image": "image"}),
        ({**ASK, "image": "ami-" + "0" * 400}, {"image": "max_length"}),
        ({**ASK, "region": "mars"}, {"region": "cloud"}),
        ({**ASK, "region": "eu-west-1"}, {"region": "cloud"}),
        ({**ASK, "instance_type": "p5.48xlarge"}, {"instance_type": "pool"}),
        ({**ASK, "stack": "a"}, {"stack": "unknown"}),
        ({}, {"region": "required", "instance_type": "required"}),
    ],
)
def test_what_cannot_be_asked_for_is_refused(body: dict[str, object], refused: dict[str, str]) -> None:
    pool(0)
    cloud_region("eu-west-1", state="reading")
    assert rules(bearer().post(PATH, body, format="json")) == refused


def test_what_all_pools_have_is_a_conflict() -> None:
    pool(0, image=NEWER)
    assert bearer().post(PATH, ASK, format="json").status_code == 409
    assert not ImageMove.objects.exists()
