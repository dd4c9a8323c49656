"""The scenarios' fleet, with a little traffic so that there is something to see. Each test leaves it whole. A browser
for each file: two of Playwright's event loops in one thread do not get along."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from lab.steady_load import background_load
from tests.scenarios.browser.watched import DESK, Look, Theme, Watched, chromium_running
from tests.scenarios.running_fleet import REGIONS, RunningFleet

RATE = 2.0
"""Requests a second: enough for every chart to have a line, little for two cores."""


@pytest.fixture(scope="package")
def running(started: RunningFleet) -> Iterator[RunningFleet]:
    with background_load([started.ingress(REGIONS[0])], "sim-70b", RATE):
        yield started


@pytest.fixture
def fleet(running: RunningFleet) -> Iterator[RunningFleet]:
    yield running
    running.wait_until_whole()


@pytest.fixture(scope="package")
def password(running: RunningFleet) -> str:
    return str(json.loads((running.home / "settings.json").read_text())["operator_password"])


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with chromium_running() as browser:
        yield browser


@pytest.fixture
def url(running: RunningFleet) -> str:
    return f"http://127.0.0.1:{running.port}"


@pytest.fixture(scope="module")
def session(chromium: Browser, running: RunningFleet, password: str) -> Any:
    """Of an operator who has signed in, as a browser stores it."""
    tab = Watched(chromium, f"http://127.0.0.1:{running.port}", Look("light", DESK))
    tab.log_in(password)
    kept = tab.context.storage_state()
    tab.close()
    return kept


@pytest.fixture
def operator(chromium: Browser, url: str, session: Any, theme: Theme) -> Iterator[Watched]:
    """A signed-in operator at a desk; a test says in which theme. There must have been no trouble at its end."""
    tab = Watched(chromium, url, Look(theme, DESK), session)
    yield tab
    assert tab.trouble() == []
    tab.close()


@pytest.fixture
def theme() -> Theme:
    return "light"
