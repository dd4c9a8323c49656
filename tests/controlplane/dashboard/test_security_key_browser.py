"""A real browser adds a security key, and shows it at the next login; the key is Chromium's virtual one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import expect, sync_playwright

from tests.controlplane.dashboard.web import browser_binary, web_process

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.django_db(transaction=True)]

LIMIT_MS = 120_000
PASSWORD = "correct horse battery"
KEY = {
    "protocol": "ctap2",
    "transport": "usb",
    "hasResidentKey": False,
    "hasUserVerification": False,
    "automaticPresenceSimulation": True,
}


@pytest.fixture
def url(tmp_path: Path, transactional_db: None) -> Iterator[str]:
    """At `localhost`, where browsers offer security keys without HTTPS."""
    User.objects.create_user("ada", password=PASSWORD)
    with web_process(tmp_path / "web.log") as address:
        yield address.replace("127.0.0.1", "localhost")


def test_a_security_key_is_added_and_shown_at_the_next_login(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_binary(), args=["--no-sandbox"])
        expect.set_options(timeout=LIMIT_MS)
        page = browser.new_page()
        page.set_default_timeout(LIMIT_MS)
        refused: list[str] = []
        page.on("console", lambda entry: refused.append(entry.text) if entry.type == "error" else None)
        page.on("pageerror", lambda error: refused.append(str(error)))
        devices = page.context.new_cdp_session(page)
        devices.send("WebAuthn.enable")
        devices.send("WebAuthn.addVirtualAuthenticator", {"options": KEY})

        page.goto(f"{url}/login/?next=/settings/second-factor/key/")
        page.fill("#id_username", "ada")
        page.fill("#id_password", PASSWORD)
        page.click("button[type=submit]")
        page.fill("#id_name", "blue key")
        page.click("text=Add the key")
        expect(page.locator("#recovery-codes")).to_be_visible()

        page.context.clear_cookies()
        page.goto(f"{url}/login/?next=/settings/")
        page.fill("#id_username", "ada")
        page.fill("#id_password", PASSWORD)
        page.click("button[type=submit]")
        page.click("text=Use a security key")
        expect(page.locator("#settings-factors")).to_contain_text("blue key")
        browser.close()
    assert refused == []
