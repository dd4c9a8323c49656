"""Every list of an installation that has nothing yet: readable, quiet, and saying how to fill it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Browser, expect

from tests.browser.pages import LISTS, Page, complaints
from tests.browser.watched import DESK, LOOKS, PHONE, Look, Watched, chromium_running
from tests.controlplane.dashboard.web import web_process

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PASSWORD = "let me in"


@pytest.fixture
def url(transactional_db: None, tmp_path: Path) -> Iterator[str]:
    User.objects.create_superuser("operator", password=PASSWORD)
    with web_process(tmp_path / "web.log") as address:
        yield address


def signed_in(browser: Browser, url: str) -> object:
    tab = Watched(browser, url, Look("light", DESK))
    tab.log_in(PASSWORD)
    session = tab.context.storage_state()
    tab.close()
    return session


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look.theme}-{look.width}")
def test_nothing_is_wrong_with_what_opens_over_a_page(url: str, look: Look) -> None:
    with chromium_running() as browser:
        tab = Watched(browser, url, look, signed_in(browser, url))
        tab.open("/nodes/")
        tab.page.locator("#search-open").click()
        tab.page.keyboard.type("operator")
        expect(tab.page.locator("#search-results [data-query]")).to_contain_text("No match for")
        assert (tab.trouble(), tab.barriers()) == ([], [])
        tab.page.keyboard.press("Escape")
        tab.page.keyboard.press("?")
        expect(tab.page.locator("#help-jumps")).to_contain_text("Rollouts")
        assert (tab.trouble(), tab.barriers()) == ([], [])
        tab.close()


def test_nothing_is_wrong_with_a_page_that_has_nothing_to_show(url: str) -> None:
    pages = [Page(*each) for each in LISTS.items()]
    with chromium_running() as browser:
        session = signed_in(browser, url)
        assert complaints(browser, url, Look("dark", PHONE), session, pages) == {}
