"""An operator at work, with nothing but a browser, on a fleet of real processes."""

import re

import pytest
from playwright.sync_api import Browser, Locator, expect

from lab.steady_load import agent_and_engine
from tests.scenarios.browser.watched import DESK, Look, Theme, Watched
from tests.scenarios.running_fleet import REGIONS, RunningFleet, eventually

pytestmark = [pytest.mark.scenario, pytest.mark.browser, pytest.mark.timeout(900)]

REGION = "us-east-1"
QUICK = {"min_healthy_s": 2}


def state_of(tab: Watched, thing: str) -> Locator:
    return tab.page.locator(f"#{thing}-state .state")


def test_wrong_passwords_stay_outside_and_the_right_one_comes_back_to_the_page(
    chromium: Browser, url: str, password: str
) -> None:
    tab = Watched(chromium, url, Look("light", DESK))
    tab.page.goto(f"{url}/cells/?region={REGION}")
    tab.page.fill("#id_username", "operator")
    tab.page.fill("#id_password", "not it")
    tab.page.click("button[type=submit]")
    expect(tab.page.get_by_role("alert")).to_contain_text("do not match")
    tab.page.fill("#id_password", password)
    tab.page.click("button[type=submit]")
    expect(tab.page).to_have_url(f"{url}/cells/?region={REGION}")
    tab.page.get_by_role("button", name="Log out").click()
    expect(tab.page.locator("#id_username")).to_be_visible()
    tab.page.goto(f"{url}/cells/")
    expect(tab.page).to_have_url(f"{url}/login/?next=/cells/")
    assert tab.trouble() == []
    tab.close()


@pytest.mark.long
@pytest.mark.parametrize("theme", ["dark"])
def test_a_cell_goes_bad_and_heals_before_my_eyes(fleet: RunningFleet, operator: Watched, theme: Theme) -> None:
    cell = next(iter(fleet.cells(deployment="sim-70b", region=REGION).values()))
    operator.open(f"/cells/{cell['id']}/")
    expect(state_of(operator, "cell")).to_have_text("ready")
    for process in agent_and_engine(cell["nodes"][1]["id"], home=fleet.home):
        process.kill()
    expect(state_of(operator, "cell")).not_to_have_text("ready")
    expect(operator.page.locator("nav[data-problems]")).to_have_attribute("data-problems", re.compile("[1-9]"))
    expect(operator.page).to_have_title(re.compile("^✕ "))
    expect(state_of(operator, "cell")).to_have_text("ready")
    expect(operator.page).to_have_title(re.compile(f"^{cell['id']}"))
    operator.open("/incidents/?state=closed")
    expect(operator.page.locator("#incidents-list")).to_contain_text(cell["id"])


@pytest.mark.long
def test_a_rollout_is_started_paused_and_rolled_back(fleet: RunningFleet, operator: Watched) -> None:
    usual = fleet.api("deployments/sim-70b")["update_policy"]
    fleet.patch("deployments/sim-70b", {"update_policy": QUICK})
    _, goal = fleet.versions()
    page = operator.page
    operator.open("/rollouts/")
    page.get_by_role("link", name="Roll out a version").click()
    page.get_by_label("Deployment").select_option("sim-70b")
    page.get_by_label("To version").select_option(goal)
    page.get_by_label("allow a version that is not released").check()
    page.get_by_role("button", name="Predict").click()
    expect(page.get_by_role("table")).to_contain_text("us-east-1 canary")
    page.get_by_role("button", name=f"Roll sim-70b out to {goal}").click()
    expect(page.locator("h1")).to_have_text(re.compile(r"Rollout \d+"))
    ask(operator, "Pause", "who is on call?")
    expect(state_of(operator, "rollout")).to_have_text("paused")
    expect(operator.page.locator("#rollout .strip")).to_contain_text("canary")
    ask(operator, "Roll back", "nobody is")
    expect(state_of(operator, "rollout")).to_have_text("rolled back")
    expect(operator.page.locator("#actions")).to_contain_text("Not for a rollout that is rolled back.")
    fleet.patch("deployments/sim-70b", {"update_policy": usual})


def ask(tab: Watched, what: str, why: str) -> None:
    tab.page.keyboard.press("a")
    tab.page.locator("#actions").get_by_role("link", name=what, exact=True).click()
    tab.page.get_by_label("Reason").fill(why)
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator("#connection")).to_have_attribute("data-state", "live")


@pytest.mark.long
def test_traffic_is_overridden_and_given_back(fleet: RunningFleet, operator: Watched) -> None:
    operator.open(f"/traffic/shares/?deployment=sim-70b&origin={REGION}")
    page = operator.page
    page.get_by_label("us-east-1, %").fill("60")
    page.get_by_label("us-west-2, %").fill("40")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#effect")).to_contain_text("us-west-2")
    page.get_by_label("Reason").fill("a test")
    page.get_by_role("button", name="Fix these shares").click()
    order = page.locator("#overrides tbody tr")
    expect(order).to_contain_text("fixed shares of sim-70b in us-east-1")
    expect(page.locator(f"#shares-sim-70b-{REGION}")).to_contain_text("40")
    order.get_by_role("button", name="End now").click()
    expect(page.locator("#overrides")).to_contain_text("No overrides")


def test_a_key_is_made_shown_once_and_revoked(fleet: RunningFleet, operator: Watched) -> None:
    page = operator.page
    operator.open("/keys/new/")
    page.get_by_label("Name").fill("browser")
    page.get_by_label("Tenant").fill("acme")
    page.get_by_role("button", name="Create key").click()
    text = page.locator("#secret-text").inner_text()
    assert text.startswith("sw_")
    page.get_by_role("link", name="Continue").click()
    assert text not in page.content()
    page.locator("#actions summary").click()
    page.locator("#actions").get_by_role("link", name="Revoke").click()
    page.locator("#revoke-why").fill("the test is over")
    page.locator("#revoke-confirm").fill("browser")
    page.get_by_role("button", name="Revoke browser").click()
    expect(state_of(operator, "key")).to_have_text("revoked")
    eventually(lambda: fleet.api(f"keys/{text.split('_')[1]}")["state"] == "revoked")


def test_a_chat_says_who_answered_and_how_fast_and_can_be_stopped(fleet: RunningFleet, operator: Watched) -> None:
    page = operator.page
    operator.open("/playground/?deployment=sim-70b")
    page.locator("#chat-tokens").fill("24")
    page.locator("#chat-text").fill("Count to ten.")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=rate]")).to_have_text(re.compile(r"^[\d.]+$"))
    expect(page.locator("[data-part=prefill]")).to_have_text(re.compile(r"\d.m?s$"))
    expect(page.locator("[data-part=request]")).to_have_text(re.compile("^[0-9a-f-]{36}$"))
    expect(page.locator("[data-part=ttft]")).to_have_text(re.compile(r"\d.m?s$"))
    expect(page.locator("[data-part=cell]")).to_have_text(re.compile("^sim-70b-"))
    expect(page.locator("[data-part=region]")).to_have_text(re.compile("|".join(REGIONS)))
    assert page.locator(".by-assistant p").inner_text()
    page.locator("#chat-tokens").fill("4096")
    page.locator("#chat-text").fill("And now to a million.")
    page.keyboard.press("Enter")
    expect(page.locator(".by-assistant p").last).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_have_text("Stopped.")
    eventually(lambda: in_flight(fleet) <= 1)


def in_flight(fleet: RunningFleet) -> int:
    """Requests that cells work on; the traffic that runs beside has few at a time."""
    return sum((cell.get("load") or {}).get("in_flight", 0) for cell in fleet.cells(deployment="sim-70b").values())
