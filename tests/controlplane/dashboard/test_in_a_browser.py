"""Tests that need a real browser, the web process and Valkey: live updates, empty lists, and security keys (Chromium's
virtual one).
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.template.loader import render_to_string
from playwright.sync_api import Browser, Page, Route, expect

from controlplane.dashboard.charts import Chart, Series
from fleet.cells.models import Cell
from fleet.faults.models import Incident
from fleet.rollouts.models import Rollout
from kernel import clock, live
from kernel.transitions import compare_and_set
from tests.controlplane.dashboard.fleets import STATES, one_more_of_everything
from tests.controlplane.dashboard.page_urls import DETAILS, FILTERED, FORMS
from tests.controlplane.dashboard.web import web_process
from tests.fleet import rows
from tests.scenarios.browser.pages import LISTS, complaints
from tests.scenarios.browser.pages import Page as Listed
from tests.scenarios.browser.watched import DESK, JUDGED, LIMIT_MS, Look, Theme, Watched, chromium_running

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.django_db(transaction=True)]

PASSWORD = "let me in"
CELL = "sim-70b-us-east-1-1"
UNTIL_CHARTS = """new Promise((done) =>
    window.Plotly ? done() : document.getElementById("plotly").addEventListener("load", done))"""
GROUND = "getComputedStyle(document.body).backgroundColor"
POLL = "const POLL_MS = 10000;"
HINTS_ONLY = 10**9
"""Without its slow poll a page changes only by hints. In ms."""
KEY = {
    "protocol": "ctap2",
    "transport": "usb",
    "hasResidentKey": False,
    "hasUserVerification": False,
    "automaticPresenceSimulation": True,
}


@pytest.fixture(scope="module")
def web(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with web_process(tmp_path_factory.mktemp("web") / "web.log") as address:
        yield address


@pytest.fixture(scope="module")
def browser(web: str) -> Iterator[Browser]:
    """Shared by all tests here. Playwright's synchronous interface runs an event loop in this thread, in which Django
    would refuse to use the database. Hints delayed by a busy machine do not matter here.
    """
    with pytest.MonkeyPatch.context() as changed, chromium_running() as browser:
        changed.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "yes")
        changed.setattr(live, "SEND_LIMIT_S", LIMIT_MS / 1000)
        yield browser


@pytest.fixture
def chromium(browser: Browser, transactional_db: None) -> Iterator[Browser]:
    """Without the pages of earlier tests."""
    yield browser
    for context in browser.contexts:
        context.unroute_all(behavior="ignoreErrors")  # open requests of a page must not fail the next test
        context.close()


@pytest.fixture
def url(web: str, transactional_db: None) -> str:
    User.objects.create_user("operator", password=PASSWORD)
    rows.cell(CELL, rows.node("n-f0000001"), rows.node("n-f0000002"))
    return web


class Reader(Watched):
    """An operator who has signed in, with a live overview."""

    def __init__(self, browser: Browser, url: str, *, theme: Theme = "light", poll_ms: int = HINTS_ONLY) -> None:
        super().__init__(browser, url, Look(theme, DESK))
        self.context.route("**/live.js", lambda route: _polling_each(poll_ms, route))
        self.log_in(PASSWORD)
        self.wait_until_live()

    def wait_until_live(self) -> None:
        """Until hints reach the page; earlier hints are lost."""
        expect(self.page.locator("#connection")).to_have_attribute("data-state", "live")


def _polling_each(ms: int, route: Route) -> None:
    response = route.fetch()
    script = response.text()
    assert POLL in script
    route.fulfill(response=response, body=script.replace(POLL, f"const POLL_MS = {ms};"))


def change(state: str, reason: str) -> None:
    """As in services: change, event and hint in one transaction."""
    event = {"kind": f"cell.{state}", "message": f"{CELL} is {state}: {reason}", "cell": CELL}
    with transaction.atomic():
        cells = Cell.objects.filter(pk=CELL)
        assert compare_and_set(cells, event=event, now=clock.now(), state=state, reason=reason)
        live.push("cells", CELL)


def test_the_overview_is_live_keeps_its_theme_and_leads_to_the_login_when_the_session_ends(
    chromium: Browser, url: str
) -> None:
    """On one page, because a login and a page with its charts take a second of a processor."""
    watched = Reader(chromium, url, theme="light")
    a_cell_changes_its_state(watched)
    the_theme_is_chosen_once_and_kept(watched.page)
    assert watched.trouble() == []
    watched.wait_until_live()
    watched.page.context.clear_cookies()
    watched.page.evaluate("htmx.trigger('#status', 'refetch')")
    expect(watched.page).to_have_url(f"{url}/login/?next=/")


def a_cell_changes_its_state(watched: Reader) -> None:
    page = watched.page
    square = page.locator(f"#square-{CELL}")
    expect(square).to_have_attribute("aria-label", f"{CELL} ready")
    change("failed", "the engine died")
    expect(square).to_have_attribute("aria-label", f"{CELL} failed")
    expect(page.locator("#status")).to_contain_text("the engine died")
    expect(page.locator("#events")).to_contain_text("is failed: the engine died")
    expect(page).to_have_title("✕ 1 · Overview · Switchyard")
    assert "favicon-problems" in (page.locator("#favicon").get_attribute("href") or "")
    change("ready", "")
    expect(square).to_have_attribute("aria-label", f"{CELL} ready")
    expect(page).to_have_title("Overview · Switchyard")


def the_theme_is_chosen_once_and_kept(page: Page) -> None:
    assert page.evaluate(GROUND) == "rgb(255, 255, 255)"
    page.click("#theme")
    page.click("#theme")
    expect(page.locator("#theme")).to_contain_text("dark")
    page.reload()
    assert page.evaluate(GROUND) != "rgb(255, 255, 255)"


def there(page: Page, heading: str) -> None:
    """Wait for a page and its keyboard shortcuts: the script that shows the theme button has bound them by then."""
    expect(page.locator("h1")).to_have_text(heading)
    expect(page.locator("#theme")).to_be_visible()


def test_the_keyboard_is_enough(chromium: Browser, url: str) -> None:
    rows.cell("sim-70b-us-east-1-2", rows.node("n-f0000003"))
    watched = Reader(chromium, url)
    page = watched.page
    there(page, "Overview")
    page.keyboard.press("g")
    page.keyboard.press("c")
    there(page, "Cells")
    page.keyboard.press("f")
    expect(page.locator("#find")).to_be_focused()
    page.keyboard.type("east-1-2")
    expect(page.locator("#cells-table tbody tr")).to_have_count(1)
    expect(page).to_have_url(f"{url}/cells/?q=east-1-2")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    row = page.locator("#row-sim-70b-us-east-1-2 [data-row]")
    expect(row).to_be_focused()
    watched.wait_until_live()
    Cell.objects.update(state="draining")
    live.push("cells")
    expect(page.locator("#cells-table")).to_contain_text("draining")
    expect(row).to_be_focused()
    page.keyboard.press("Enter")
    there(page, "sim-70b-us-east-1-2")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_contain_text("Overview")
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#search-text")).to_be_focused()
    page.keyboard.type(CELL)
    expect(page.locator("#search-results .what")).to_have_text([CELL])
    page.keyboard.press("Enter")
    there(page, CELL)
    Cell.objects.update(state="ready")
    User.objects.update(is_superuser=True)  # viewers are offered no actions
    page.keyboard.press("Control+k")
    page.keyboard.type(f"drain {CELL}: slow")
    expect(page.get_by_role("option").first).to_contain_text(f"Drain {CELL}")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Reason")).to_have_value("slow")
    assert watched.trouble() == []


@pytest.mark.long
def test_a_page_does_not_wait_for_its_charts(chromium: Browser, url: str) -> None:
    watched = Reader(chromium, url)
    page = watched.page
    held: list[Route] = []
    page.route("**/plotly*.js", lambda route: held.append(route))  # noqa: PLW0108  (the library marks the function)
    page.goto(f"{url}/cells/{CELL}/", wait_until="commit")
    there(page, CELL)
    page.keyboard.press("Control+k")
    page.keyboard.type(CELL)
    expect(page.locator("#search-results .what")).to_have_text([CELL])
    assert page.evaluate("window.Plotly") is None
    page.keyboard.press("Escape")
    held[0].continue_()
    page.evaluate(UNTIL_CHARTS)
    the_table_below_a_chart_is_made_when_it_is_opened(page)
    assert watched.trouble() == []


def the_table_below_a_chart_is_made_when_it_is_opened(page: Page) -> None:
    """The newest step first, without steps that no line knows, and with as many decimals as the chart."""
    lines = (Series("median", (1.0, None, 1234.567, None)), Series("<p95>", (None, None, 2.0, None)))
    drawn = Chart("table-test", "TTFT", "ms", datetime(2026, 11, 21, 12, tzinfo=UTC), 15.0, lines, decimals=2)
    html = render_to_string("dashboard/charts/chart.html", {"chart": drawn})
    page.evaluate("html => document.getElementById('content').insertAdjacentHTML('beforeend', html)", html)
    page.locator("#table-test-table summary").click()
    expect(page.locator("#table-test-table tbody tr")).to_have_text(
        ["11-21 12:00:301\u202f234.572.00", "11-21 12:00:001.00\u2013"]
    )


@pytest.mark.long
def test_a_search_that_got_no_response_is_sent_again(chromium: Browser, url: str) -> None:
    page = Reader(chromium, url, poll_ms=500).page
    there(page, "Overview")
    page.route("**/search/*", lambda route: route.abort(), times=1)
    page.keyboard.press("/")
    page.keyboard.type(CELL)
    expect(page.locator("#search-results .what")).to_have_text([CELL])


@pytest.mark.long
def test_an_outage_is_shown_with_its_age_and_ends_by_itself(chromium: Browser, url: str) -> None:
    page = Reader(chromium, url, poll_ms=500).page
    page.context.set_offline(True)
    change("draining", "scaled down")
    page.evaluate("htmx.trigger('#status', 'refetch')")
    banner = page.locator("#disconnected")
    expect(banner).to_be_visible()
    expect(banner).to_contain_text("Switchyard is unreachable")
    expect(page.locator("#connection")).to_have_attribute("data-state", "disconnected")
    page.context.set_offline(False)
    expect(banner).to_be_hidden()
    expect(page.locator("#moving")).to_contain_text("scaled down")


@pytest.mark.long
def test_a_refused_fragment_says_so_and_can_be_asked_again(chromium: Browser, url: str) -> None:
    page = Reader(chromium, url).page
    page.route("**/", lambda route: route.fulfill(status=503, body="no"))
    page.evaluate("htmx.trigger('#status', 'refetch')")
    failure = page.locator("#status [data-failure]")
    expect(failure).to_contain_text("The server returned 503.")
    page.unroute("**/")
    failure.get_by_role("button").click()
    expect(failure).to_be_hidden()


@pytest.mark.long
def test_an_open_menu_stays_unfolded_while_its_page_refreshes(chromium: Browser, url: str) -> None:
    columns = {"kind": "node-lost", "subject": "n", "summary": "Node n is lost", "evidence": {"silent_s": 31}}
    incident = Incident.objects.create(**columns, opened_at=clock.now())
    watched = Reader(chromium, url)
    page = watched.page
    page.goto(f"{url}/incidents/{incident.pk}/")
    watched.wait_until_live()
    page.locator("#actions > summary").click()
    Incident.objects.update(summary="Node n is lost for good")
    live.push("incidents")
    expect(page.locator("h1")).to_have_text("Node n is lost for good")
    expect(page.locator("#incident-evidence")).to_contain_text("Silent for")
    expect(page.locator("#actions")).to_have_attribute("open", "")


@pytest.mark.long
def test_nothing_is_wrong_where_there_is_nothing_to_show(
    chromium: Browser, web: str, subtests: pytest.Subtests
) -> None:
    User.objects.create_superuser("operator", password=PASSWORD)
    session = signed_in(chromium, web)
    with subtests.test("pages"):
        lists = [Listed(*each) for each in LISTS.items()]
        assert complaints(chromium, web, session, lists, thorough=True) == {}
    for look in JUDGED:
        with subtests.test(f"what opens over a page, {look}"):
            assert troubles_of_overlays(chromium, web, look, session) == []


@pytest.mark.long
def test_nothing_is_wrong_with_a_page_of_anything_in_a_fleet(chromium: Browser, web: str) -> None:
    """Everything that a page can show, in every state of a cell and in every look."""
    User.objects.create_superuser("operator", password=PASSWORD)
    for number, _ in enumerate(STATES):
        one_more_of_everything(number)
    numbered = [f"/incidents/{pk}/" for pk in Incident.objects.values_list("pk", flat=True)[:2]]
    numbered += [f"/rollouts/{pk}/" for pk in Rollout.objects.values_list("pk", flat=True)[:1]]
    urls = (*LISTS.values(), *FILTERED, *DETAILS, *FORMS, *numbered)
    pages = [Listed(re.sub(r"\W+", "-", url).strip("-") or "overview", url) for url in urls]
    assert complaints(chromium, web, signed_in(chromium, web), pages, thorough=True) == {}


def signed_in(browser: Browser, url: str) -> object:
    tab = Watched(browser, url, Look("light", DESK))
    tab.log_in(PASSWORD)
    session = tab.context.storage_state()
    tab.close()
    return session


def troubles_of_overlays(browser: Browser, url: str, look: Look, session: object) -> list[str]:
    """Problems of the search and the list of shortcuts, opened over a page."""
    tab = Watched(browser, url, look, session)
    tab.open("/nodes/")
    tab.page.locator("#search-open").click()
    tab.page.keyboard.type("node")
    results = tab.page.locator("#search-results")
    expect(results.get_by_role("option").first).to_have_attribute("aria-selected", "true")
    troubles = tab.trouble() + tab.barriers()
    tab.page.locator("#search-text").fill("operator")
    expect(results.locator("[data-query]")).to_contain_text("No object, page or action matches")
    troubles += tab.trouble() + tab.barriers()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("?")
    expect(tab.page.locator("#help-jumps")).to_contain_text("Rollouts")
    troubles += tab.trouble() + tab.barriers()
    tab.close()
    return troubles


def test_a_security_key_is_added_and_shown_at_the_next_login(chromium: Browser, web: str) -> None:
    User.objects.create_user("ada", password=PASSWORD)
    url = web.replace("127.0.0.1", "localhost")  # browsers offer security keys there without HTTPS
    page = chromium.new_page()
    page.set_default_timeout(LIMIT_MS)
    refused: list[str] = []
    page.on("console", lambda entry: refused.append(entry.text) if entry.type == "error" else None)
    page.on("pageerror", lambda error: refused.append(str(error)))
    devices = page.context.new_cdp_session(page)
    devices.send("WebAuthn.enable")
    devices.send("WebAuthn.addVirtualAuthenticator", {"options": KEY})

    give_password(page, f"{url}/login/?next=/settings/second-factor/key/")
    page.fill("#id_name", "blue key")
    page.click("text=Add the key")
    expect(page.locator("#recovery-codes")).to_be_visible()

    page.context.clear_cookies()
    give_password(page, f"{url}/login/?next=/settings/")
    page.click("text=Use a security key")
    expect(page.locator("#settings-factors")).to_contain_text("blue key")
    assert refused == []


def give_password(page: Page, address: str) -> None:
    page.goto(address)
    page.fill("#id_username", "ada")
    page.fill("#id_password", PASSWORD)
    page.click("button[type=submit]")


@pytest.mark.long
def test_a_form_survives_a_session_that_ends_while_one_types(chromium: Browser, url: str) -> None:
    User.objects.update(is_superuser=True)
    page = Reader(chromium, url).page
    page.goto(f"{url}/new/deployment/")
    page.click("text=Service")
    page.context.clear_cookies(name=re.compile("switchyard_session"))
    page.fill("#input-drain_deadline_s", "77")
    expect(page.locator("#wizard-check")).to_contain_text("Your session has ended")
    with page.expect_popup() as opened:
        page.click("text=Log in in another tab")
    tab = opened.value
    tab.fill("#id_username", "operator")
    tab.fill("#id_password", PASSWORD)
    tab.click("button[type=submit]")
    expect(tab.locator("h1")).to_have_text("Overview")
    expect(page.locator("#input-drain_deadline_s")).to_have_value("77")
    page.fill("#input-name", "chat")
    expect(page.locator("#wizard-yaml")).to_contain_text("drain_deadline_s: 77.0")
    page.goto(f"{url}/new/deployment/")
    page.click("text=Restore what I typed")
    expect(page.locator("#input-name")).to_have_value("chat")
    expect(page.locator("#wizard-yaml")).to_contain_text("drain_deadline_s: 77.0")
