"""Every list of an installation that has nothing yet: readable, quiet, and saying how to fill it."""

from pathlib import Path

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Browser, expect

from tests.controlplane.dashboard.web import web_process
from tests.scenarios.browser.pages import LISTS, Page, complaints
from tests.scenarios.browser.watched import DESK, JUDGED, Look, Watched, chromium_running

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]

PASSWORD = "let me in"


def test_nothing_is_wrong_where_there_is_nothing_to_show(tmp_path: Path, subtests: pytest.Subtests) -> None:
    User.objects.create_superuser("operator", password=PASSWORD)
    with web_process(tmp_path / "web.log") as url, chromium_running() as browser:
        session = signed_in(browser, url)
        with subtests.test("pages"):
            pages = [Page(*each) for each in LISTS.items()]
            assert complaints(browser, url, session, pages) == {}
        for look in JUDGED:
            with subtests.test(f"what opens over a page, {look}"):
                assert troubles_of_overlays(browser, url, look, session) == []


def signed_in(browser: Browser, url: str) -> object:
    tab = Watched(browser, url, Look("light", DESK))
    tab.log_in(PASSWORD)
    session = tab.context.storage_state()
    tab.close()
    return session


def troubles_of_overlays(browser: Browser, url: str, look: Look, session: object) -> list[str]:
    """What is wrong with the search and the list of keys, open over a page."""
    tab = Watched(browser, url, look, session)
    tab.open("/nodes/")
    tab.page.locator("#search-open").click()
    tab.page.keyboard.type("operator")
    expect(tab.page.locator("#search-results [data-query]")).to_contain_text("No match for")
    troubles = tab.trouble() + tab.barriers()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("?")
    expect(tab.page.locator("#help-jumps")).to_contain_text("Rollouts")
    troubles += tab.trouble() + tab.barriers()
    tab.close()
    return troubles
