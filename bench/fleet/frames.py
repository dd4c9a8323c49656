"""Times of frames in headless Chromium while a page scrolls, and while the yard map also changes its fill. Frames are
those of `requestAnimationFrame`. Times of work are CPU times of the page's main thread, without other processes.
Chromium renders in software."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench import percentile

WIDTH, HEIGHT = 1440, 900
BUDGET_MS = 1000 / 60
TICK_MS = 0.15
"""Both ends of a frame are rounded to 0.1 ms, so a frame of 16.8 ms is on time."""
ROUNDS = 3
SCROLL_FRAMES = 180
SCROLL_PX = 60
FILL_EVERY, FILL_FRAMES = 60, 400
"""An operator who scrolls and looks at each of the six fills for a second."""
_SCROLL = """([frames, step, every]) => new Promise(done => {
    const times = []; let before, down = 1, place = 0;
    const frame = now => {
        if (before) times.push(now - before);
        before = now;
        if (times.length >= frames) return done(times);
        const fills = document.querySelectorAll("#map .spans a");
        if (every && times.length % every === 0) fills[++place % fills.length].click();
        const most = document.documentElement.scrollHeight - innerHeight;
        if (scrollY >= most - 1) down = -1; else if (scrollY <= 0) down = 1;
        scrollBy({top: down * step, behavior: "instant"});
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
})"""
_NODES = "document.querySelectorAll('*').length"


@dataclass
class Frames:
    """Milliseconds between frames, and the main thread's work in each, by round."""

    times: list[list[float]] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    layout_ms: list[float] = field(default_factory=list)
    script_ms: list[float] = field(default_factory=list)

    @contextmanager
    def work(self, devtools: Any) -> Iterator[None]:
        """Adds the work of the main thread per frame of the round that is measured within."""
        before = _metrics(devtools)
        yield
        after, frames = _metrics(devtools), max(1, len(self.times[-1]))
        spent = {name: 1000 * (after[name] - before[name]) / frames for name in after}
        self.busy_ms.append(spent["TaskDuration"])
        self.layout_ms.append(spent["LayoutDuration"] + spent["RecalcStyleDuration"])
        self.script_ms.append(spent["ScriptDuration"])

    def line(self, name: str, elements: int) -> str:
        tails = [percentile(times, 0.95) for times in self.times]
        late = sum(time > BUDGET_MS + TICK_MS for times in self.times for time in times)
        every = sum(len(times) for times in self.times)
        mark = " **" if statistics.median(tails) > BUDGET_MS + TICK_MS else ""
        parts = [_range(tails), _range([max(times) for times in self.times])]
        parts += [_range(self.busy_ms), _range(self.layout_ms), _range(self.script_ms)]
        return f"| {name} | {elements:,} | {' | '.join(parts)} | {late} of {every}{mark} |"


def frames_measure(address: str, cookie: tuple[str, str], pages: Sequence[tuple[str, str]]) -> None:
    """Prints a table. `pages`: name and path of each page to scroll; the first one has the yard map."""
    from playwright.sync_api import sync_playwright

    print("\nFrames of a page that scrolls, median of three rounds with least and greatest. A 60th second is 16.7 ms.")
    print("\n| page | elements | p95 ms | longest ms | CPU ms of a frame | layout and style | script | late frames |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        context.add_cookies([{"name": cookie[0], "value": cookie[1], "domain": "127.0.0.1", "path": "/"}])
        page = context.new_page()
        devtools = context.new_cdp_session(page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        for name, path in pages:
            page.goto(address + path, wait_until="networkidle")
            print(_scrolled(page, devtools).line(name, page.evaluate(_NODES)), flush=True)
        page.goto(address + pages[0][1], wait_until="networkidle")
        filled = _scrolled(page, devtools, frames=FILL_FRAMES, fill_every=FILL_EVERY)
        print(filled.line(f"{pages[0][0]}, another fill each second", page.evaluate(_NODES)), flush=True)
        browser.close()


def _scrolled(page: Any, devtools: Any, *, frames: int = SCROLL_FRAMES, fill_every: int = 0) -> Frames:
    """`fill_every`: the map gets its next fill after so many frames; 0: never."""
    found, how = Frames(), [frames, SCROLL_PX, fill_every]
    page.evaluate(_SCROLL, how)  # everything is painted once
    for _ in range(ROUNDS):
        found.times.append([0.0] * frames)
        with found.work(devtools):
            found.times[-1] = page.evaluate(_SCROLL, how)
    return found


def _metrics(devtools: Any) -> dict[str, float]:
    names = {"TaskDuration", "LayoutDuration", "RecalcStyleDuration", "ScriptDuration"}
    found = devtools.send("Performance.getMetrics")["metrics"]
    return {each["name"]: each["value"] for each in found if each["name"] in names}


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
