"""Every page of a fleet at work, in both themes, on a desk and on a phone: without errors, without sideways scrolling,
without a request that leaves the host, and without a barrier that axe-core calls serious."""

import pytest
from playwright.sync_api import Browser

from controlplane.dashboard.urls import urlpatterns
from tests.browser.pages import LISTS, Page, all_pages, complaints
from tests.browser.watched import DESK, LOOKS, Look, Watched
from tests.load import agent_and_engine
from tests.scenarios.running_fleet import RunningFleet, eventually

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

SLOW_STEPS = {"canary_bake_s": 30, "bake_s": 30, "min_healthy_s": 2}


@pytest.fixture(scope="module")
def lived_in(running: RunningFleet) -> list[Page]:
    """The fleet has seen a key, a rollout that was taken back, and an incident that healed."""
    running.wait_until_whole()
    running.post("keys", {"name": "search", "tenant": "acme", "deployments": ["sim-70b"]})
    spare = next(node["id"] for node in running.api("nodes")["results"] if not node["cell"])
    for process in agent_and_engine(spare, home=running.home):
        process.kill()
    version = {"deployment": "sim-70b", "version": "sim-70b@2", "allow_unreleased": True, "policy": SLOW_STEPS}
    rollout = running.post("rollouts", version)["id"]
    eventually(lambda: running.api(f"rollouts/{rollout}")["state"] == "baking", 60)
    running.post(f"rollouts/{rollout}/roll-back", {"why": "enough seen"})
    eventually(lambda: running.api(f"rollouts/{rollout}")["state"] == "rolled_back", 90)
    eventually(lambda: running.api("incidents", state="closed")["results"], 90)
    running.wait_until_whole()
    return all_pages(running)


@pytest.fixture(scope="module")
def session(chromium: Browser, running: RunningFleet, password: str) -> object:
    tab = Watched(chromium, f"http://127.0.0.1:{running.port}", Look("light", DESK))
    tab.log_in(password)
    kept = tab.context.storage_state()
    tab.close()
    return kept


def test_every_list_is_opened_here() -> None:
    opened = {path.strip("/").partition("/")[0].partition("?")[0] for path in LISTS.values()}
    pages = {str(route.pattern).partition("/")[0] for route in urlpatterns}
    assert pages - opened == {"login", "logout"}


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look.theme}-{look.width}")
def test_nothing_is_wrong_with_any_page(
    chromium: Browser, url: str, session: object, lived_in: list[Page], look: Look
) -> None:
    assert complaints(chromium, url, look, session, lived_in, shoot=True) == {}
