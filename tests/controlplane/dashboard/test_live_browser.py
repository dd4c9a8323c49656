"""A person watches the fleet: a real browser, the real web process, hints over the real Valkey."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
from django.contrib.auth.models import User
from django.db import connections, transaction
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from fleet.models import Cell, Incident
from kernel import clock, live
from kernel.transitions import compare_and_set
from tests.controlplane.dashboard.web import browser_binary, web_process
from tests.fleet import rows

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.django_db(transaction=True)]

Theme = Literal["light", "dark"]
CELL = "sim-70b-us-east-1-1"
UNTIL_CHARTS = """new Promise((done) =>
    window.Plotly ? done() : document.getElementById("plotly").addEventListener("load", done))"""
GROUND = "getComputedStyle(document.body).backgroundColor"
LIMIT_MS = 120_000
"""For whatever must happen: generous, for machines that do much else."""
POLL = "const POLL_MS = 10000;"
HINTS_ONLY = 10**9
"""Without its slow poll a page changes by a hint or not at all. In ms."""


@pytest.fixture(scope="module")
def web(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with web_process(tmp_path_factory.mktemp("web") / "web.log") as address:
        yield address


@pytest.fixture
def url(web: str, transactional_db: None) -> str:
    User.objects.create_user("operator", password="let me in")
    rows.cell(CELL, rows.node("n-f0000001"), rows.node("n-f0000002"))
    return web


@pytest.fixture(scope="module")
def binary() -> str:
    found = browser_binary()
    if found is None:
        pytest.fail("there is no chromium on PATH, and these tests need one: apt-get install chromium", pytrace=False)
    return found


@pytest.fixture
def chromium(binary: str, url: str) -> Iterator[Browser]:
    """Ends before the database is emptied: while it lives, Django refuses to work in this thread (see `aside`)."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        expect.set_options(timeout=LIMIT_MS)
        yield browser
        browser.close()


class Watched:
    """A signed-in page that remembers errors and requests to other hosts."""

    def __init__(
        self, browser: Browser, url: str, *, theme: Theme = "light", width: int = 1440, poll_ms: int = HINTS_ONLY
    ) -> None:
        self.url = url
        self.trouble: list[str] = []
        context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
        context.set_default_timeout(LIMIT_MS)
        context.route("**/live.js", lambda route: _polling_each(poll_ms, route))
        self.page: Page = context.new_page()
        self.page.on("console", lambda entry: self._note(entry.text) if entry.type in {"error", "warning"} else None)
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("request", lambda request: None if self._is_ours(request.url) else self._note(request.url))
        self._log_in()

    def _is_ours(self, address: str) -> bool:
        return address.startswith((self.url, self.url.replace("http", "ws", 1)))

    def _note(self, text: str) -> None:
        self.trouble.append(text)

    def _log_in(self) -> None:
        self.page.goto(f"{self.url}/")
        self.page.fill("#id_username", "operator")
        self.page.fill("#id_password", "let me in")
        self.page.click("button[type=submit]")
        expect(self.page.locator("h1")).to_have_text("Overview")
        self.wait_until_live()

    def wait_until_live(self) -> None:
        """Until hints reach the page; those of before are lost."""
        expect(self.page.locator("#connection")).to_have_attribute("data-state", "live")


def _polling_each(ms: int, route: Route) -> None:
    response = route.fetch()
    script = response.text()
    assert POLL in script
    route.fulfill(response=response, body=script.replace(POLL, f"const POLL_MS = {ms};"))


def aside(work: Callable[[], object]) -> None:
    """Do `work` in another thread: Playwright's synchronous interface runs an event loop in this one."""

    def work_and_disconnect() -> None:
        try:
            work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work_and_disconnect).result()


def change(state: str, reason: str) -> None:
    """What a service does: change, event and hint in one transaction."""

    def work() -> None:
        event = {"kind": f"cell.{state}", "message": f"{CELL} is {state}: {reason}", "cell": CELL}
        with transaction.atomic():
            cells = Cell.objects.filter(pk=CELL)
            assert compare_and_set(cells, event=event, now=clock.now(), state=state, reason=reason)
            live.push("cells", CELL)

    aside(work)


def test_a_cell_changes_its_state_before_my_eyes(chromium: Browser, url: str) -> None:
    watched = Watched(chromium, url, theme="light")
    page = watched.page
    square = page.locator(f"#square-{CELL}")
    expect(square).to_have_attribute("aria-label", f"{CELL} ready")
    change("failed", "the engine died")
    expect(square).to_have_attribute("aria-label", f"{CELL} failed")
    expect(page.locator("#broken")).to_contain_text("the engine died")
    expect(page.locator("#events")).to_contain_text("is failed: the engine died")
    expect(page).to_have_title("✕ 1 · Overview · Switchyard")
    assert "favicon-problems" in (page.locator("#favicon").get_attribute("href") or "")
    change("ready", "")
    expect(square).to_have_attribute("aria-label", f"{CELL} ready")
    expect(page).to_have_title("Overview · Switchyard")
    assert watched.trouble == []


def test_the_theme_is_chosen_once_and_kept(chromium: Browser, url: str) -> None:
    page = Watched(chromium, url, theme="light").page
    assert page.evaluate(GROUND) == "rgb(255, 255, 255)"
    page.click("#theme")
    page.click("#theme")
    expect(page.locator("#theme")).to_contain_text("dark")
    page.reload()
    assert page.evaluate(GROUND) != "rgb(255, 255, 255)"


def there(page: Page, heading: str) -> None:
    """Wait for a page and for its keys: the script that shows the button of themes listens to them by then."""
    expect(page.locator("h1")).to_have_text(heading)
    expect(page.locator("#theme")).to_be_visible()


def test_the_keyboard_is_enough(chromium: Browser, url: str) -> None:
    aside(lambda: rows.cell("sim-70b-us-east-1-2", rows.node("n-f0000003")))
    watched = Watched(chromium, url)
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
    aside(lambda: Cell.objects.update(state="draining"))
    aside(lambda: live.push("cells"))
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
    expect(page.locator("#search-results [data-row]")).to_have_text([CELL])
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(CELL)
    assert watched.trouble == []


def test_a_page_does_not_wait_for_its_charts(chromium: Browser, url: str) -> None:
    watched = Watched(chromium, url)
    page = watched.page
    held: list[Route] = []
    page.route("**/plotly*.js", lambda route: held.append(route))  # noqa: PLW0108  (the library marks the function)
    page.goto(f"{url}/cells/{CELL}/", wait_until="commit")
    there(page, CELL)
    page.keyboard.press("/")
    page.keyboard.type(CELL)
    expect(page.locator("#search-results [data-row]")).to_have_text([CELL])
    assert page.evaluate("window.Plotly") is None
    page.keyboard.press("Escape")
    held[0].continue_()
    page.evaluate(UNTIL_CHARTS)
    assert watched.trouble == []


def test_a_search_that_got_no_response_is_sent_again(chromium: Browser, url: str) -> None:
    page = Watched(chromium, url, poll_ms=500).page
    there(page, "Overview")
    page.route("**/search/*", lambda route: route.abort(), times=1)
    page.keyboard.press("/")
    page.keyboard.type(CELL)
    expect(page.locator("#search-results [data-row]")).to_have_text([CELL])


def test_an_outage_is_shown_with_its_age_and_ends_by_itself(chromium: Browser, url: str) -> None:
    page = Watched(chromium, url, poll_ms=500).page
    page.context.set_offline(True)
    change("draining", "scaled down")
    page.evaluate("htmx.trigger('#broken', 'refetch')")
    banner = page.locator("#disconnected")
    expect(banner).to_be_visible()
    expect(banner).to_contain_text("Switchyard is unreachable")
    expect(page.locator("#connection")).to_have_attribute("data-state", "disconnected")
    page.context.set_offline(False)
    expect(banner).to_be_hidden()
    expect(page.locator("#moving")).to_contain_text("scaled down")


def test_a_refused_fragment_says_so_and_can_be_asked_again(chromium: Browser, url: str) -> None:
    page = Watched(chromium, url).page
    page.route("**/", lambda route: route.fulfill(status=503, body="no"))
    page.evaluate("htmx.trigger('#broken', 'refetch')")
    failure = page.locator("#broken [data-failure]")
    expect(failure).to_contain_text("The server returned 503.")
    page.unroute("**/")
    failure.get_by_role("button").click()
    expect(failure).to_be_hidden()


def test_an_open_incident_stays_unfolded_while_the_list_refreshes(chromium: Browser, url: str) -> None:
    columns = {"kind": "node-lost", "subject": "n", "summary": "Node n is lost", "evidence": {"silent_s": 31}}
    aside(lambda: Incident.objects.create(**columns, opened_at=clock.now()))
    watched = Watched(chromium, url)
    page = watched.page
    page.goto(f"{url}/incidents/")
    watched.wait_until_live()
    page.locator("summary").click()
    aside(lambda: Incident.objects.update(summary="Node n is lost for good"))
    aside(lambda: live.push("incidents"))
    expect(page.locator("summary")).to_have_text("Node n is lost for good")
    expect(page.locator("#incidents-list")).to_contain_text("silent_s")
    expect(page.locator("details")).to_have_attribute("open", "")


def test_a_session_that_ended_leads_back_to_the_login(chromium: Browser, url: str) -> None:
    page = Watched(chromium, url).page
    page.context.clear_cookies()
    page.evaluate("htmx.trigger('#broken', 'refetch')")
    expect(page).to_have_url(f"{url}/login/?next=/")
