"""Pages of a large fleet: no list takes more queries for more cells than the overview has rows."""

import pytest

from controlplane.dashboard.overview import ROWS_SHOWN
from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.controlplane.dashboard.page_urls import LISTS
from tests.controlplane.dashboard.reading import queries

pytestmark = pytest.mark.django_db

SIZED = ("overview", "cells", "nodes", "deployments", "traffic", "models", "incidents", "events")


@pytest.mark.slow
def test_thirty_cells_take_as_many_queries_as_five() -> None:
    client = signed_in()
    counts: list[dict[str, int]] = []
    for numbers in (range(5), range(5, ROWS_SHOWN + 10)):
        for number in numbers:
            one_more_of_everything(number)
        counts.append({name: queries(client, LISTS[name]) for name in SIZED})
    assert counts[0] == counts[1]
