"""Every page of a fleet at work, in both themes, on a desk and on a phone: without errors, without sideways scrolling,
without a request that leaves the host, and without a barrier that axe-core calls serious."""

import pytest
from playwright.sync_api import Browser

from controlplane.dashboard.urls import urlpatterns
from lab.steady_load import agent_and_engine
from tests.scenarios.browser.pages import LISTS, Page, all_pages, complaints
from tests.scenarios.running_fleet import RunningFleet, eventually

pytestmark = [pytest.mark.scenario, pytest.mark.browser, pytest.mark.timeout(900)]

SLOW_STEPS = {"canary_bake_s": 30, "bake_s": 30, "min_healthy_s": 2}


@pytest.fixture(scope="module")
def lived_in(running: RunningFleet) -> list[Page]:
    """The fleet has seen a key, a rollout that was taken back, and an incident that healed: here, if not before."""
    running.wait_until_whole()
    if not running.api("keys")["results"]:
        running.post("keys", {"name": "search", "tenant": "acme", "deployments": ["sim-70b"]})
    if not running.api("incidents", state="closed")["results"]:
        spare = next(node["id"] for node in running.api("nodes")["results"] if not node["cell"])
        for process in agent_and_engine(spare, home=running.home):
            process.kill()
    if not running.api("rollouts")["results"]:
        _roll_out_and_back(running)
    running.post("model-versions", {"model": "sim-70b", "version": "next", "based_on": "sim-70b@2"})
    eventually(lambda: running.api("incidents", state="closed")["results"])
    running.wait_until_whole()
    return all_pages(running)


def _roll_out_and_back(fleet: RunningFleet) -> None:
    _, goal = fleet.versions()
    asked = {"deployment": "sim-70b", "version": goal, "policy": SLOW_STEPS, "allow_unreleased": True}
    rollout = fleet.post("rollouts", asked)["id"]
    eventually(lambda: fleet.api(f"rollouts/{rollout}")["state"] == "baking")
    fleet.post(f"rollouts/{rollout}/roll-back", {"why": "enough seen"})
    eventually(lambda: fleet.api(f"rollouts/{rollout}")["state"] == "rolled_back")


def test_every_list_is_opened_here() -> None:
    opened = {path.strip("/").partition("/")[0].partition("?")[0] for path in LISTS.values()}
    pages = {str(route.pattern).partition("/")[0] for route in urlpatterns}
    # The page of models lists builds, that of a version compile caches, and that of machines invitations.
    assert pages - opened == {"builds", "compile-caches", "invitations", "login", "logout", "why"}


def test_nothing_is_wrong_with_any_page(
    chromium: Browser, url: str, session: object, lived_in: list[Page], thorough: bool
) -> None:
    assert complaints(chromium, url, session, lived_in, thorough=thorough) == {}
