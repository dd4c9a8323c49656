"""A slow network, a lost answer, a double click, two tabs and restarts of web: nothing is lost or done twice, and
nothing is overwritten unseen."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, Route, expect

from tests.scenarios.browser.watched import DESK, Look, Watched
from tests.scenarios.running_fleet import RunningFleet, eventually

pytestmark = [pytest.mark.scenario, pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

POLICY = "/deployments/sim-70b/updates/"
SLOW = {"offline": False, "latency": 400, "downloadThroughput": 50_000, "uploadThroughput": 50_000}
NAME = "a bad day"
DOCUMENTS = """\
apiVersion: switchyard/v1
kind: Model
metadata: {name: paper}
spec: {description: only in a draft}
"""
ATTEMPTS = 40
"""Most connections of a page in an outage of a minute or two: a reconnect without backoff makes hundreds."""


@pytest.fixture
def tab(chromium: Browser, url: str, session: object) -> Iterator[Page]:
    """A tab whose failures are part of the test."""
    watched = Watched(chromium, url, Look("light", DESK), session)
    watched.open("/")
    yield watched.page
    watched.close()


@pytest.fixture
def drafts(fleet: RunningFleet, tab: Page, url: str) -> Iterator[None]:
    """Deletes all plan drafts after the test."""
    yield
    tab.unroute_all()
    tab.goto(f"{url}/plan/drafts/")
    while tab.get_by_role("link", name=NAME).count():
        tab.get_by_role("link", name=NAME).first.click()
        expect(tab.locator("h1")).to_have_text(NAME)
        tab.goto(f"{tab.url.partition('?')[0]}ask/delete/")
        tab.get_by_role("button", name=f"Delete {NAME}").click()
        expect(tab.locator("h1")).to_have_text("Plan drafts")


def open_new_draft(tab: Page, url: str) -> Locator:
    """Opens and fills the form of a new draft; returns its button."""
    tab.goto(f"{url}/plan/drafts/new/")
    tab.get_by_label("Name").fill(NAME)
    tab.get_by_label("Documents (YAML)").fill(DOCUMENTS)
    return tab.get_by_role("button", name="Create draft")


def number_of_drafts(tab: Page, url: str) -> int:
    tab.goto(f"{url}/plan/drafts/")
    return tab.get_by_role("link", name=NAME).count()


def posts(page: Page) -> list[Request]:
    """Requests that change something, as they are sent from now on."""
    sent: list[Request] = []
    page.on("request", lambda request: sent.append(request) if is_post(request) else None)
    return sent


def is_post(request: Request) -> bool:
    return request.method == "POST"


def sending(page: Page) -> Locator:
    return page.locator(".sending")


def expect_typed(tab: Page) -> None:
    expect(tab.get_by_label("Name")).to_have_value(NAME)
    expect(tab.get_by_label("Documents (YAML)")).to_have_value(re.compile("only in a draft"))


@pytest.mark.usefixtures("drafts")
def test_a_slow_network_sends_two_clicks_once_and_a_replay_changes_nothing(tab: Page, url: str) -> None:
    create, sent = open_new_draft(tab, url), posts(tab)
    network = tab.context.new_cdp_session(tab)
    network.send("Network.enable")
    network.send("Network.emulateNetworkConditions", SLOW)
    create.dblclick()
    expect(tab.locator("h1")).to_have_text(NAME)
    assert len(sent) == 1
    network.detach()
    headers = {"content-type": sent[0].headers["content-type"], "referer": sent[0].url}
    replay = tab.context.request.post(sent[0].url, data=sent[0].post_data_buffer, headers=headers)
    assert replay.url == tab.url
    assert number_of_drafts(tab, url) == 1


@pytest.mark.usefixtures("drafts")
def test_a_request_that_hangs_and_fails_loses_nothing(tab: Page, url: str) -> None:
    create, held = open_new_draft(tab, url), list[Route]()
    tab.route("**/drafts/new/", lambda route: held.append(route) if is_post(route.request) else route.fallback())
    create.dblclick(no_wait_after=True)
    while not held:
        tab.wait_for_timeout(50)  # the page itself cannot be asked while its next one is pending
    with tab.expect_event("requestfailed", is_post):
        held[0].abort("connectionreset")
    assert len(held) == 1
    tab.unroute_all()
    tab.goto(f"{url}/plan/drafts/new/")
    expect(sending(tab)).to_contain_text("got no answer")
    expect_typed(tab)
    create.click()
    expect(tab.locator("h1")).to_have_text(NAME)
    assert number_of_drafts(tab, url) == 1


@pytest.mark.usefixtures("drafts")
def test_a_form_whose_answer_a_restart_loses_is_sent_again_and_done_once(
    fleet: RunningFleet, tab: Page, url: str
) -> None:
    def lose(route: Route) -> None:
        if is_post(route.request):
            route.fetch(max_redirects=0)
            fleet.service("web").kill()
            route.abort("connectionreset")
        else:
            route.fallback()

    create = open_new_draft(tab, url)
    tab.route("**/drafts/new/", lose)
    with tab.expect_event("requestfailed", is_post):
        create.click(no_wait_after=True)
    tab.unroute_all()
    eventually(fleet.answers)
    tab.goto(f"{url}/plan/drafts/new/")
    expect(sending(tab)).to_contain_text("got no answer")
    expect_typed(tab)
    create.click()
    expect(tab.locator("h1")).to_have_text(NAME)
    assert number_of_drafts(tab, url) == 1


@pytest.mark.usefixtures("drafts")
def test_web_restarts_under_a_press(fleet: RunningFleet, tab: Page, url: str) -> None:
    create, sent = open_new_draft(tab, url), posts(tab)
    web = fleet.service("web")
    web.suspend()
    create.click()
    expect(sending(tab)).to_have_text("Waiting for Switchyard …")
    web.kill()
    expect(sending(tab)).to_contain_text("Switchyard is unreachable")
    expect_typed(tab)
    expect(sending(tab)).to_contain_text("Switchyard is back")
    assert sent == []
    create.click()
    expect(tab.locator("h1")).to_have_text(NAME)
    assert number_of_drafts(tab, url) == 1


def test_a_live_page_reconnects_and_shows_what_changed(fleet: RunningFleet, tab: Page, url: str) -> None:
    connections: list[str] = []
    tab.on("websocket", lambda socket: connections.append(socket.url))
    tab.goto(f"{url}/deployments/sim-70b/")
    expect(tab.locator("#connection")).to_have_attribute("data-state", "live")
    fleet.service("web").kill()
    expect(tab.locator("#connection")).not_to_have_attribute("data-state", "live")
    alerts = tab.get_by_role("alert")
    assert alerts.count() <= 1
    expect(tab.locator("#connection")).to_have_attribute("data-state", "live")
    expect(tab.locator("#disconnected")).to_be_hidden()
    assert len(connections) < ATTEMPTS
    usual = fleet.api("deployments/sim-70b")["drain_deadline_s"]
    fleet.patch("deployments/sim-70b", {"drain_deadline_s": usual + 1})
    tab.locator("#deployment-events").scroll_into_view_if_needed()
    expect(tab.locator("#deployment-events")).to_contain_text("drain_deadline_s")
    fleet.patch("deployments/sim-70b", {"drain_deadline_s": usual})


def test_a_page_that_refreshes_keeps_a_form_and_refuses_it_if_it_is_stale(
    fleet: RunningFleet, tab: Page, url: str
) -> None:
    tab.goto(f"{url}/usage/")
    expect(tab.locator("#connection")).to_have_attribute("data-state", "live")
    tab.get_by_text("Set a budget").click()
    tab.get_by_label("Tenant (empty").fill("acme")
    tab.get_by_label("Limit per month").fill("900")
    budget = fleet.post("budgets", {"tenant": "acme", "unit": "usd", "limit": "1200"})["id"]
    expect(tab.locator(f"#budget-{budget}")).to_contain_text("1,200.00 USD")
    expect(tab.get_by_label("Limit per month")).to_have_value("900")
    expect(tab.get_by_label("Limit per month")).to_be_focused()
    tab.get_by_role("button", name="Set budget").click()
    expect(tab.locator("main")).to_contain_text(
        "budget of tenant acme (usd) was set to 1200 by operator while this form"
    )
    assert float(fleet.api(f"budgets/{budget}")["limit"]) == 1200
    fleet.delete(f"budgets/{budget}")


def test_the_second_of_two_tabs_sees_both_values(fleet: RunningFleet, tab: Page, url: str) -> None:
    usual = fleet.api("deployments/sim-70b")["update_policy"]
    other = tab.context.new_page()
    for page in (tab, other):
        page.goto(f"{url}{POLICY}")
    for page, value in ((tab, "31"), (other, "47")):
        page.get_by_label("Healthy for, seconds").fill(value)
        expect(page.locator("#wizard-yaml")).to_contain_text(f"min_healthy_s: {value}")
        if page is tab:
            page.get_by_role("button", name="Review").click()
            page.get_by_role("button", name="Apply").click()
            expect(page.locator("h1")).to_have_text("sim-70b")
    expect(other.locator("#error-min_healthy_s")).to_contain_text("it is '31' now, and you have '47'")
    assert fleet.api("deployments/sim-70b")["update_policy"]["min_healthy_s"] == 31
    other.get_by_role("button", name="Keep what I typed").click()
    expect(other.locator("#wizard-conflicts")).to_be_hidden()
    other.get_by_role("button", name="Review").click()
    other.get_by_role("button", name="Apply").click()
    expect(other.locator("h1")).to_have_text("sim-70b")
    assert fleet.api("deployments/sim-70b")["update_policy"]["min_healthy_s"] == 47
    fleet.patch("deployments/sim-70b", {"update_policy": usual})
