"""Pages of a large fleet: no page asks the database more often for a hundred cells than for ten."""

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything

pytestmark = pytest.mark.django_db

PAGES = ("/", "/cells/", "/nodes/", "/deployments/", "/traffic/", "/models/", "/incidents/", "/events/")


def test_a_hundred_cells_take_as_many_queries_as_ten() -> None:
    client = signed_in()
    asked: list[dict[str, int]] = []
    for numbers in (range(10), range(10, 100)):
        for number in numbers:
            one_more_of_everything(number)
        asked.append({page: _queries(client, page) for page in PAGES})
    assert asked[0] == asked[1]


def _queries(client: Client, page: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(page).status_code == 200
    return len(captured)
