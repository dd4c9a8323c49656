"""Every page that an operator can open, and checks for each in every look (theme and width)."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.controlplane.dashboard import page_urls
from tests.controlplane.dashboard.reading import whole
from tests.scenarios.browser.watched import JUDGED, LOOKS, Look, Watched
from tests.scenarios.running_fleet import RunningFleet

IN_EVERY_LOOK = frozenset({"overview", "cell", "rollout", "traffic", "playground"})
"""Pages that the default run also opens in a second theme and width, with screenshots in all four."""
SCREENS = os.environ.get("SWITCHYARD_SCREENS", "")
"""Folder for screenshots. Empty, as in CI: none."""

LISTS: dict[str, str] = {
    **page_urls.LISTS,
    **page_urls.SETTINGS,
    "batch-schedule-new": "/batches/schedules/new/",
    "batch-sink-new": "/batches/sinks/new/",
    "group-new": "/settings/groups/new/",
    "key-new": "/keys/new/",
    "model-new": "/new/model/",
    "plan-draft-new": "/plan/drafts/new/",
    "runbook": "/runbooks/node-lost/",
    "search": "/search/?q=sim",
    "single-sign-on-change": "/settings/single-sign-on/change/",
    "tenant": "/tenant/",
    "user-new": "/settings/users/new/",
    "webhook-new": "/settings/webhooks/new/",
}
"""Name of its screenshot -> address, for pages that also exist on an empty fleet."""


@dataclass(frozen=True, slots=True)
class Page:
    name: str
    path: str


def all_pages(fleet: RunningFleet) -> list[Page]:
    """The lists, and one page of each kind of object in the fleet."""

    def first(noun: str, **query: str) -> Any:
        return fleet.api(noun, **query)["results"][0]

    node = first("nodes", role="leader")["id"]
    cell = first("cells", deployment="sim-70b")["id"]
    story = first("incidents", state="closed")
    _, goal = fleet.versions()
    details = {
        "cell": f"/cells/{cell}/",
        "cell-logs": f"/cells/{cell}/logs/",
        "deployment": "/deployments/sim-70b/",
        "deployment-new": "/new/deployment/",
        "draft": "/models/sim-70b@next/edit/",
        "evacuate": "/traffic/evacuate/us-east-1/?deployment=sim-70b",
        "incident": f"/incidents/{story['id']}/",
        "instance-type": "/instance-types/local.cpu/",
        "key": f"/keys/{first('keys')['prefix']}/",
        "model": "/models/sim-70b/",
        "node": f"/nodes/{node}/",
        "past": f"/?at={story['opened_at']}",
        "region": "/regions/us-east-1/",
        "rollout": f"/rollouts/{first('rollouts')['id']}/",
        "rollout-new": f"/rollouts/new/?deployment=sim-70b&version={goal}",
        "shares": "/traffic/shares/?deployment=sim-70b&origin=us-east-1",
        "version": "/models/sim-70b@1/",
        "why": f"/why/cell:{cell}/",
        "version-diff": "/models/sim-70b@2/diff/?against=sim-70b@1",
    }
    return [Page(*each) for each in {**LISTS, **details}.items()]


def complaints(browser: Browser, url: str, session: Any, pages: list[Page], *, thorough: bool) -> dict[str, list[str]]:
    """Returns problems by page. Each page is opened in one look and changed into others without a reload: all of them
    if `thorough`, with axe-core in each, else a second one for the pages of `IN_EVERY_LOOK`.
    """
    tab = Watched(browser, url, LOOKS[0], session)
    found: dict[str, list[str]] = {}
    for page in pages:
        looks = LOOKS if thorough or SCREENS else JUDGED if page.name in IN_EVERY_LOOK else JUDGED[1:]
        tab.change(looks[0])
        tab.open(whole(page.path))
        wrong: list[str] = []
        for look in looks:
            tab.change(look)
            barriers = tab.barriers() if thorough or look in JUDGED else []
            wrong += [f"{look}: {each}" for each in tab.trouble() + barriers]
            if SCREENS and (look in JUDGED or page.name in IN_EVERY_LOOK):
                tab.open(whole(page.path))  # charts react to a change of width with a delay
                _shoot(tab, page, look)
        if wrong:
            found[page.name] = wrong
    tab.close()
    return found


def _shoot(tab: Watched, page: Page, look: Look) -> None:
    folder = Path(SCREENS)
    folder.mkdir(parents=True, exist_ok=True)
    tab.page.screenshot(path=folder / f"{page.name}{look.suffix}.png", animations="disabled")
