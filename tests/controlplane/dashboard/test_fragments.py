"""What a fragment tells the browser: when to ask again, where, and what to do when the session is over."""

import pytest
from django.test import Client

from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.controlplane.dashboard.reading import whole

pytestmark = pytest.mark.django_db


def test_a_fragment_asks_again_at_its_own_filtered_url() -> None:
    one_more_of_everything(0)
    text = fragment(signed_in(), "/cells/?state=ready", "cells-table")
    assert 'hx-get="/cells/?state=ready"' in text
    assert 'data-topics="cells load"' in text


def test_a_page_about_one_cell_listens_to_that_cell_only() -> None:
    cell = one_more_of_everything(0)
    assert f'data-topics="cells:{cell.pk} nodes load"' in fragment(signed_in(), f"/cells/{cell.pk}/", "cell")


def test_no_cache_mixes_up_a_page_and_its_fragments() -> None:
    response = signed_in().get("/cells/")
    assert "HX-Target" in response.headers["Vary"]
    assert "no-store" in response.headers["Cache-Control"]


def test_an_unknown_target_gets_the_whole_page() -> None:
    text = signed_in().get("/cells/", headers={"HX-Request": "true", "HX-Target": "nonsense"}).text
    assert text.startswith("<!DOCTYPE html>")


def test_a_fragment_after_the_session_sends_the_whole_page_to_the_login(client: Client) -> None:
    headers = {"HX-Request": "true", "HX-Target": "cells-table", "HX-Current-URL": "http://testserver/cells/?q=a"}
    response = client.get("/cells/?q=a", headers=headers)
    assert response.status_code == 401
    assert response.headers["HX-Redirect"] == "/login/?next=/cells/%3Fq%3Da"


def test_a_thing_that_is_gone_is_a_404_for_its_fragments_too() -> None:
    response = signed_in().get("/cells/gone/", headers={"HX-Request": "true", "HX-Target": "cell"})
    assert response.status_code == 404


def test_the_navigation_keeps_its_place_when_it_refreshes() -> None:
    text = fragment(signed_in(), "/nodes/", "navigation")
    assert text.count('aria-current="page"') == 1
    assert 'href="/nodes/" aria-current="page"' in text


def test_a_deferred_fragment_is_empty_until_it_is_fetched() -> None:
    url = f"/cells/{one_more_of_everything(0).pk}/"
    place = '<section id="cell-load" class="fragment later" aria-labelledby="cell-load-title" data-later data-topics=""'
    client = signed_in()
    text = client.get(f"{url}?range=24h").text
    assert place in text
    assert 'href="?range=24h&amp;parts=all#cell-load"' in text
    assert '<figure class="chart"' not in text
    assert 'data-topics="history"' in fragment(client, url, "cell-load")


def test_a_browser_without_scripts_gets_all_parts() -> None:
    url = f"/cells/{one_more_of_everything(0).pk}/"
    text = signed_in().get(whole(url)).text
    assert "data-later" not in text
    assert '<figure class="chart" aria-labelledby="rate-title">' in text


@pytest.mark.parametrize("parts", ["", "none", "all,all"])
def test_odd_parts_are_ignored(parts: str) -> None:
    assert signed_in().get("/", {"parts": parts}).status_code == 200
