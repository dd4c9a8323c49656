"""Every list of an installation that has nothing yet: readable, quiet, and saying how to fill it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import User

from tests.browser.pages import LISTS, Page, complaints
from tests.browser.watched import DESK, PHONE, Look, Watched, chromium_running
from tests.controlplane.dashboard.web import web_process

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PASSWORD = "let me in"
LOOKS = (Look("light", DESK), Look("dark", PHONE))


@pytest.fixture
def url(transactional_db: None, tmp_path: Path) -> Iterator[str]:
    User.objects.create_superuser("operator", password=PASSWORD)
    with web_process(tmp_path / "web.log") as address:
        yield address


def test_nothing_is_wrong_with_a_page_that_has_nothing_to_show(url: str) -> None:
    pages = [Page(*each) for each in LISTS.items()]
    with chromium_running() as browser:
        tab = Watched(browser, url, Look("light", DESK))
        tab.log_in(PASSWORD)
        session = tab.context.storage_state()
        tab.close()
        judged = frozenset({Look("dark", PHONE)})
        found = {look: complaints(browser, url, look, session, pages, judged=judged) for look in LOOKS}
        assert found == {look: {} for look in LOOKS}
