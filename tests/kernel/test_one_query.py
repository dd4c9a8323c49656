"""Questions about several tables in one query."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fleet.regions.models import Region
from kernel.one_query import counts, which_exist

pytestmark = pytest.mark.django_db


def test_several_tables_are_asked_in_one_query() -> None:
    for position, name in enumerate(("a", "b")):
        Region.objects.create(name=name, position=position)
    asked = (
        Region.objects.filter(name="a"),
        Region.objects.filter(name="it's %s").order_by("name"),
        Region.objects.exclude(name="c").order_by("position"),
    )
    with CaptureQueriesContext(
        connection,
    ) as queries:
        assert which_exist(*asked) == (True, False, True)
        assert counts(*asked) == (1, 0, 2)
    assert len(queries) == 2
