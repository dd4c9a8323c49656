"""Lists in the order that was asked for: declared fields only, every row once, however many are equal or empty."""

from datetime import timedelta

import pytest

from fleet.rollouts.models import Rollout
from tests.controlplane.api.client import DescribedClient, bearer, document, lists, rules
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def ordered() -> list[tuple[str, list[str]]]:
    """Each list with the names by which it can be ordered."""
    return [
        (path, parameter["schema"]["items"]["enum"])
        for path in lists()
        for parameter in document()["paths"][path]["get"].get("parameters", ())
        if parameter["name"] == "ordering"
    ]


def walk(client: DescribedClient, url: str) -> list[object]:
    seen: list[object] = []
    while url:
        page = client.get(url).json()
        seen += [row["id"] for row in page["results"]]
        url = page["next"]
    return seen


def test_every_declared_field_orders() -> None:
    client = bearer()
    for path, names in ordered():
        for name in names:
            assert client.get(path, {"ordering": name}).status_code == 200, (path, name)


def test_another_field_is_refused_with_those_that_are_allowed() -> None:
    client = bearer()
    for path, names in ordered():
        response = client.get(path, {"ordering": "secret"})
        assert rules(response) == {"ordering": "invalid_choice"}, path
        allowed = [name for name in names if not name.startswith("-")]
        assert ", ".join(allowed) in response.json()["errors"][0]["message"], path


@pytest.mark.parametrize("ordering", ["", "id,", "id,state,region,created_at", "--id", "id;drop"])
def test_what_is_no_order_is_refused(ordering: str) -> None:
    response = bearer().get("/api/v1/nodes", {"ordering": ordering})
    assert set(rules(response)) == {"ordering"}


@pytest.mark.parametrize("sign", ["", "-"])
def test_rows_that_are_equal_in_it_are_shown_once(sign: str) -> None:
    for number in range(7):
        rows.node(f"n-{number:08x}", state="ready" if number % 3 else "suspect")
    suspects = [f"n-{number:08x}" for number in (0, 3, 6)]
    ready = [f"n-{number:08x}" for number in (1, 2, 4, 5)]
    for size in (1, 2, 3, 7):
        seen = walk(bearer(), f"/api/v1/nodes?ordering={sign}state&page_size={size}")
        assert seen == (ready + suspects if not sign else (ready + suspects)[::-1]), size


@pytest.mark.parametrize("sign", ["", "-"])
def test_rows_without_a_value_come_last(sign: str) -> None:
    deployment = rows.deployment()
    ids = [
        Rollout.objects.create(
            deployment=deployment,
            from_version=deployment.model_version,
            to_version=rows.version("2"),
            state="succeeded",
            reason="r",
            region_order=["us-east-1"],
            policy={},
            actor="a",
            created_at=NOW,
            state_since=NOW,
            ended_at=NOW + timedelta(hours=hour, microseconds=1) if hour else None,
        ).pk
        for hour in (2, 0, 1, 0, 3)
    ]
    ended = [ids[2], ids[0], ids[4]]
    for size in (1, 2, 5):
        seen = walk(bearer(), f"/api/v1/rollouts?ordering={sign}ended_at&page_size={size}")
        assert seen[:3] == (ended if not sign else ended[::-1]), size
        assert sorted(map(str, seen[3:])) == sorted(map(str, [ids[1], ids[3]])), size


def test_the_way_back_is_the_same_rows() -> None:
    for number in range(6):
        rows.node(f"n-{number:08x}", state="ready" if number % 2 else "suspect")
    client = bearer()
    first = client.get("/api/v1/nodes?ordering=-state,id&page_size=2").json()
    second = client.get(first["next"]).json()
    third = client.get(second["next"]).json()
    assert client.get(third["previous"]).json()["results"] == second["results"]
    assert client.get(second["previous"]).json()["results"] == first["results"]


def test_a_cursor_of_another_order_is_refused() -> None:
    for number in range(3):
        rows.node(f"n-{number:08x}")
    client = bearer()
    link = client.get("/api/v1/nodes?ordering=state&page_size=1").json()["next"]
    assert rules(client.get(link.replace("ordering=state", "ordering=created_at"))) == {"cursor": "cursor"}
