"""The DNS entry over HTTP: planned shares, published weights, and adopting foreign records."""

import pytest

from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.entry.models import Entry, EntryRevision

pytestmark = pytest.mark.django_db

NAME = "llm.example.com"
PATH = f"/api/v1/entry/{NAME}"


@pytest.fixture
def entry() -> Entry:
    rows.region("us-east-1")
    rows.region("eu-west-1")
    entry = Entry.objects.create(name=NAME, seen="5c0c8bd8a1b1f1d2", seen_weights={"us-east-1": 3})
    weights = {"us-east-1": 127, "eu-west-1": 128}
    for revision, state in ((1, "replaced"), (2, "in_force"), (3, "lost")):
        EntryRevision.objects.create(
            entry=entry, revision=revision, token=f"{revision:032x}", weights=weights, records=[], state=state,
            reason="r", at=NOW,
        )  # fmt: skip
    return entry


def test_it_shows_what_stands_there_and_every_attempt(entry: Entry) -> None:
    vera = calls(make_user("vera", Role.VIEWER))
    shown = vera.get(PATH).json()
    assert (shown["published"], shown["state"], shown["weights"]["us-east-1"]) == (2, "in_force", 127)
    attempts = vera.get("/api/v1/entry-revisions", {"entry": NAME, "state": "lost"}).json()["results"]
    assert [each["revision"] for each in attempts] == [3]


def test_an_admin_plans_shares_and_repeats_it_for_nothing(entry: Entry) -> None:
    ada = calls(make_user("ada", Role.ADMIN))
    ada.patch(PATH, {"shares": {"us-east-1": 3}}, format="json")
    changed = ada.patch(PATH, {"shares": {"us-east-1": 3}}, format="json").json()
    assert (changed["shares"], changed["revision"], changed["actor"]) == ({"us-east-1": 3.0}, 1, "ada")
    assert Event.objects.filter(kind="entry.planned").count() == 1


@pytest.mark.parametrize(
    ("shares", "broken"),
    [
        ({"us-west-9": 1}, {"shares.us-west-9": "region"}),
        ({"us-east-1": -1}, {"shares.us-east-1": "share"}),
        ({"us-east-1": 1e7}, {"shares.us-east-1": "share"}),
        ({"us-east-1": 0, "eu-west-1": 0}, {"shares": "none"}),
    ],
)
def test_shares_that_cannot_be_are_refused(entry: Entry, shares: dict[str, float], broken: dict[str, str]) -> None:
    ada = calls(make_user("ada", Role.ADMIN))
    response = ada.patch(PATH, {"shares": shares}, format="json")
    assert (response.status_code, rules(response)) == (400, broken)
    entry.refresh_from_db()
    assert entry.shares == {}


def test_only_what_was_looked_at_may_be_replaced(entry: Entry) -> None:
    ada = calls(make_user("ada", Role.ADMIN))
    assert ada.post(f"{PATH}/adopt", {"seen": "5c0c8bd8a1b1f1d2"}, format="json").status_code == 409, "nothing to adopt"
    Entry.objects.update(held="somebody wrote there")
    assert ada.post(f"{PATH}/adopt", {"seen": "0" * 16}, format="json").status_code == 409
    assert ada.post(f"{PATH}/adopt", {"seen": "5c0c8bd8a1b1f1d2"}, format="json").status_code == 200
    entry.refresh_from_db()
    assert entry.adopted == "5c0c8bd8a1b1f1d2"


def test_an_operator_may_do_neither(entry: Entry) -> None:
    olga = calls(make_user("olga", Role.OPERATOR))
    assert olga.patch(PATH, {"shares": {}}, format="json").status_code == 403
    assert olga.post(f"{PATH}/adopt", {"seen": "5c0c8bd8a1b1f1d2"}, format="json").status_code == 403
