"""A page in a real browser that records errors, warnings, failed requests and accessibility problems."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from tests.controlplane.dashboard.web import browser_binary

Theme = Literal["light", "dark"]
DESK, PHONE = 1440, 390
HEIGHT = 900
LIMIT_MS = 120_000
"""Generous limit, for busy machines."""
UNSEEN_PAGES = ("WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "SpareRendererForSitePerProcess")
"""Features of Chromium that cost more per window than the tested page."""
OFF_BY_PLAYWRIGHT = (
    *("HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable", "PaintHolding", "DestroyProfileOnBrowserClose"),
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "ThirdPartyStoragePartitioning", "AvoidCorsURLLoaderRestartOnRedirect"),
    *("OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled", "PreconnectToSearch", "MediaRouter"),
    "LensOverlay",
)
"""Repeated, because Chromium takes the last of two such options."""
CHROMIUM_ARGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"),
    f"--disable-features={','.join((*UNSEEN_PAGES, *OFF_BY_PLAYWRIGHT))}",
)
ASKED = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa")
GRAVE = frozenset({"serious", "critical"})
AXE = (Path(__file__).parent / "vendor/axe-4.12.1.min.js").read_text()
RUN_AXE = "tags => axe.run(document, {runOnly: tags, resultTypes: ['violations']})"
BEYOND = "Math.max(0, document.documentElement.scrollWidth - innerWidth)"


@dataclass(frozen=True, slots=True)
class Look:
    theme: Theme
    width: int

    @property
    def suffix(self) -> str:
        """Suffix of a screenshot's name; empty for the light desktop one."""
        return ("-phone" if self.width == PHONE else "") + ("-dark" if self.theme == "dark" else "")

    def __str__(self) -> str:
        return f"{self.theme}, {self.width} px"


LOOKS = (Look("dark", PHONE), Look("light", PHONE), Look("light", DESK), Look("dark", DESK))
"""Each theme at each width, in the order in which an open page is changed."""
JUDGED = (LOOKS[0], LOOKS[2])
"""Looks in which axe-core runs by default: each theme once, and each width once."""


@contextmanager
def chromium_running() -> Iterator[Browser]:
    """While it runs, this thread has an event loop: stop it before asynchronous code or Django's database."""
    binary = browser_binary()
    assert binary, "there is no chromium on PATH, and these tests need one: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=CHROMIUM_ARGS)
        expect.set_options(timeout=LIMIT_MS)
        yield browser
        browser.close()


class Watched:
    """A tab. `trouble`: errors, warnings, failed requests and requests to other hosts since the last call."""

    def __init__(self, browser: Browser, url: str, look: Look, session: Any = None) -> None:
        self.url = url
        self.look = look
        self._trouble: list[str] = []
        self._aborted = 0
        viewport = {"width": look.width, "height": HEIGHT}
        self.context = browser.new_context(color_scheme=look.theme, viewport=viewport, storage_state=session)  # type: ignore[arg-type]
        self.context.set_default_timeout(LIMIT_MS)
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda said: self._note(said.text) if said.type in {"error", "warning"} else None)
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("requestfailed", self._note_abort)
        self.page.on("request", lambda request: None if self._is_ours(request.url) else self._note(request.url))

    def log_in(self, password: str) -> None:
        self.page.goto(f"{self.url}/login/")
        self.page.fill("#id_username", "operator")
        self.page.fill("#id_password", password)
        self.page.click("button[type=submit]")
        expect(self.page.locator("h1")).to_have_text("Overview")

    def open(self, path: str) -> None:
        """Go to a page and wait until it receives hints."""
        answer = self.page.goto(f"{self.url}{path}")
        if answer is None or answer.status != 200:
            self._note(f"{path} answered {answer.status if answer else 'nothing'}")
        connection = self.page.locator("#connection")
        if connection.count():
            expect(connection).to_have_attribute("data-state", "live")

    def change(self, look: Look) -> None:
        """Change theme and width of an open page, as an operating system does."""
        self.page.emulate_media(color_scheme=look.theme)
        self.page.set_viewport_size({"width": look.width, "height": HEIGHT})

    def trouble(self) -> list[str]:
        """htmx logs two errors for a request that ends because its page is left. Other failures name another cause."""
        found, self._trouble = self._trouble, []
        for _ in range(2 * self._aborted):
            if (left := next((text for text in found if text.startswith("htmx:")), None)) is not None:
                found.remove(left)
        self._aborted = 0
        if beyond := self.page.evaluate(BEYOND):
            found.append(f"{beyond} px wider than the window")
        return found

    def barriers(self) -> list[str]:
        """axe-core's accessibility violations: rule and element."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE)
        violations = self.page.evaluate(RUN_AXE, list(ASKED))["violations"]
        return [
            f"{one['id']} ({one['impact']}): {json.dumps([node['target'] for node in one['nodes']][:4])}"
            for one in violations
            if one["impact"] in GRAVE
        ]

    def close(self) -> None:
        self.context.close()

    def _is_ours(self, address: str) -> bool:
        return address.startswith((self.url, self.url.replace("http", "ws", 1), "data:", "blob:"))

    def _note_abort(self, request: Request) -> None:
        self._aborted += request.failure == "net::ERR_ABORTED"

    def _note(self, text: str) -> None:
        self._trouble.append(text)
