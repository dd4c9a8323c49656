"""Every page of the urlconf is among those whose queries are counted at two sizes of the fleet."""

import pytest
from django.contrib.auth.models import User
from django.urls import resolve, reverse

from controlplane.dashboard.fragments import Page
from controlplane.dashboard.urls import urlpatterns
from fleet.faults.models import Incident
from fleet.rollouts.models import Rollout
from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.controlplane.dashboard.page_urls import FLEET_PAGES
from tests.controlplane.dashboard.reading import queries

PAGES = {str(route.name): route for route in urlpatterns if route.callback.__qualname__.startswith("page_view.")}
COUNTED = {resolve(url.partition("?")[0]).url_name for url in FLEET_PAGES}
"""Those of test_full_pages."""
PLAIN = sorted(name for name, route in PAGES.items() if "<" not in str(route.pattern) and name not in COUNTED)
NUMBERED = ("rollouts", "incidents")
"""Pages about one of these: only the database knows their ids."""


def test_every_page_is_counted() -> None:
    assert PAGES.keys() - COUNTED - set(PLAIN) - {"rollout", "incident"} == set()


@pytest.mark.slow
@pytest.mark.django_db
def test_pages_without_an_argument_take_as_many_queries_in_a_larger_fleet() -> None:
    client, counts = signed_in(), []
    for numbers in (range(2), range(2, 7)):
        for number in numbers:
            one_more_of_everything(number)
            User.objects.create_user(f"user-{number}")
        counts.append({name: queries(client, reverse(name)) for name in PLAIN})
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.parametrize("kind", NUMBERED)
def test_a_page_about_a_numbered_thing_takes_as_many_queries_in_a_larger_fleet(kind: str) -> None:
    client = signed_in()
    one_more_of_everything(0)
    things = Rollout.objects.all() if kind == "rollouts" else Incident.objects.all()
    first = things.order_by("pk")[0].pk
    counts = []
    for numbers in (range(1, 3), range(3, 8)):
        for number in numbers:
            one_more_of_everything(number)
        counts.append(queries(client, f"/{kind}/{first}/"))
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.django_db
def test_an_object_that_does_not_exist_has_no_file() -> None:
    client = signed_in()
    wrong: dict[tuple[str, str], int] = {}
    for name, route in PAGES.items():
        if "<" in str(route.pattern):
            url = reverse(name, args=("none@1" if "version:" in str(route.pattern) else "none",))
            page: Page = vars(route.callback)["page"]
            files = [{"format": "csv", "list": each.prefix} for each in page.lists]
            wrong |= {(url, str(file)): code for file in files if (code := client.get(url, file).status_code) != 404}
    assert wrong == {}
