"""ETags on single objects, and writes that succeed only if the object has not changed since it was read."""

import pytest

from fleet.cells.models import Cell
from fleet.nodes.models import Node, NodeReport
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

PATH = "/api/v1/nodes/n-00000001"


def test_a_single_object_has_a_strong_tag_and_a_list_none() -> None:
    rows.node("n-00000001")
    client = bearer()
    assert client.get(PATH)["ETag"].startswith('"')
    assert "ETag" not in client.get("/api/v1/nodes")


def test_who_has_the_present_one_gets_no_body() -> None:
    rows.node("n-00000001")
    client = bearer()
    tag = client.get(PATH)["ETag"]
    response = client.get(PATH, headers={"if-none-match": tag})
    assert (response.status_code, response.content, response["ETag"]) == (304, b"", tag)
    NodeReport.objects.update(last_seen_at=NOW.replace(hour=13))
    assert client.get(PATH, headers={"if-none-match": tag}).status_code == 200


def test_a_write_on_what_was_looked_at_goes_on() -> None:
    rows.node("n-00000001")
    client = bearer()
    tag = client.get(PATH)["ETag"]
    NodeReport.objects.update(last_seen_at=NOW.replace(hour=13))
    assert client.post(f"{PATH}/cordon", headers={"if-match": tag}).status_code == 200


def test_a_write_on_what_has_changed_since_is_refused_with_the_present_tag() -> None:
    rows.node("n-00000001")
    client = bearer()
    tag = client.get(PATH)["ETag"]
    Node.objects.update(state="suspect")
    response = client.post(f"{PATH}/cordon", headers={"if-match": tag})
    assert response.status_code == 412
    assert response["ETag"] == client.get(PATH)["ETag"]
    assert not Node.objects.get().cordoned


def test_a_change_answers_with_the_tag_of_what_it_made() -> None:
    rows.deployment()
    client, path = bearer(), "/api/v1/deployments/sim-70b"
    wanted = {"regions": [{"region": "us-east-1", "cells": 3}]}
    changed = client.patch(path, wanted, format="json", headers={"if-match": client.get(path)["ETag"]})
    assert changed.status_code == 200
    assert changed["ETag"] == client.get(path)["ETag"]
    stale = client.patch(path, wanted, format="json", headers={"if-match": '"0-0"'})
    assert stale.status_code == 412


def test_a_star_asks_only_that_it_is_there() -> None:
    rows.node("n-00000001")
    client = bearer()
    assert client.post(f"{PATH}/cordon", headers={"if-match": "*"}).status_code == 200
    assert client.post("/api/v1/nodes/n-2/cordon", headers={"if-match": "*"}).status_code == 404


def test_an_idempotent_write_may_have_a_condition_too() -> None:
    rows.cell("c-1")
    client, path = bearer(), "/api/v1/cells/c-1"
    headers = {"if-match": client.get(path)["ETag"], "idempotency-key": "k"}
    assert client.post(f"{path}/drain", headers=headers).status_code == 200
    assert Cell.objects.get().state == "draining"
