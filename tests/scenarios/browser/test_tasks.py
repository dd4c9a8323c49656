"""Tasks of an operator who knows no documentation, by keyboard alone: each takes few enough clicks, of which a key that
opens or chooses something counts as one."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, expect

from lab.checkpoints import CONFIGS, write_checkpoint
from lab.steady_load import agent_and_engine
from tests.models_registry.imports.hub import LocalHub, local_hub
from tests.scenarios.browser.watched import Watched
from tests.scenarios.running_fleet import REGIONS, RunningFleet, eventually

pytestmark = [pytest.mark.scenario, pytest.mark.browser, pytest.mark.timeout(900)]

MOST_TABS = 400
"""Elements of a page that a keyboard passes on its way to one."""
ONE_CELL_LESS = (
    "{{apiVersion: switchyard/v1, kind: Deployment, metadata: {{name: sim-70b}}, "
    "spec: {{regions: [{{region: {region}, cells: 1}}]}}}}"
)
GATED = {"canary_bake_s": 10, "bake_s": 0, "min_healthy_s": 2, "gate": {"min_samples": 20}}
SLOW = {"kind": "slow", "factor": 8}
SMALL = {**CONFIGS["gqa"], "num_hidden_layers": 1, "hidden_size": 192, "head_dim": 16, "vocab_size": 320}


class Keyboard:
    """The keyboard of a tab. `clicks`: how many clicks of a pointer would have done the same."""

    def __init__(self, tab: Watched) -> None:
        self.page = tab.page
        self.clicks = 0
        tab.open("/")

    def go(self, letter: str, heading: str) -> None:
        """To a page of the menu."""
        expect(self.page.locator("#theme")).to_be_visible()  # the script that shows it has bound the keys
        self.page.keyboard.press("g")
        self.page.keyboard.press(letter)
        self.clicks += 1
        self.arrived(heading)

    def press(self, element: Locator) -> None:
        """Reach an element and use it."""
        self.reach(element)
        self.page.keyboard.press("Enter")
        self.clicks += 1

    def reach(self, element: Locator) -> None:
        expect(element).to_be_visible()
        for _ in range(MOST_TABS):
            if element.evaluate("it => it === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {element}")

    def arrived(self, heading: str) -> None:
        expect(self.page.locator("h1")).to_have_text(heading)
        expect(self.page.locator("#connection")).to_have_attribute("data-state", "live")

    def fill(self, label: str, text: str) -> None:
        self.reach(self.page.get_by_label(label))
        self.page.keyboard.type(text)

    def choose(self, label: str, option: str) -> None:
        """In a menu, which a pointer opens first."""
        menu = self.page.get_by_label(label, exact=True)
        self.reach(menu)
        self.page.keyboard.type(option)
        expect(menu).to_have_value(option)
        self.clicks += 2


@pytest.fixture
def keyboard(operator: Watched) -> Keyboard:
    return Keyboard(operator)


def barriers_of(tab: Watched) -> list[str]:
    return tab.trouble() + tab.barriers()


def test_a_region_is_lost_in_a_draft_only(fleet: RunningFleet, operator: Watched, keyboard: Keyboard) -> None:
    """The task of the default run: the draft removes a cell of the region. Nothing of the fleet changes."""
    lost, other = REGIONS
    before = fleet.cells()
    page = operator.page.locator("main")
    keyboard.go("l", "Plan drafts")
    keyboard.press(operator.page.get_by_role("link", name="New draft"))
    keyboard.fill("Name", "One cell less")
    keyboard.fill("Documents (YAML)", ONE_CELL_LESS.format(region=lost))
    assert barriers_of(operator) == []
    keyboard.press(operator.page.get_by_role("button", name="Create draft"))
    keyboard.arrived("One cell less")
    expect(page).to_contain_text(f"sim-70b should have 1 cell in {lost}, not 2")
    keyboard.press(operator.page.get_by_role("link", name=f"Simulate the loss of {lost}"))
    expect(page).to_contain_text(f"If {lost} is lost after this draft:")
    expect(page).to_contain_text(f"sim-70b in {lost}")
    expect(page).to_contain_text("1 ready now, at least 0 on the way")
    expect(page).to_contain_text(f"sim-70b in {other}")
    assert keyboard.clicks <= 4
    assert barriers_of(operator) == []
    assert {name: cell["generation"] for name, cell in fleet.cells().items()} == {
        name: cell["generation"] for name, cell in before.items()
    }


@pytest.fixture
def hub(fleet: RunningFleet, tmp_path: Path) -> Iterator[LocalHub]:
    """Has the model `org/model`. Deletes its deployment after the test."""
    with local_hub(fleet.hub_port) as served:
        folder = write_checkpoint(tmp_path / "hub", SMALL)
        served.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        yield served
    for region in REGIONS:
        fleet.scale("model", region, 0)
    fleet.delete("deployments/model")


@pytest.mark.long
@pytest.mark.usefixtures("hub")
def test_a_new_model_answers_a_prompt(operator: Watched, keyboard: Keyboard) -> None:
    """From its name on a hub to the answer on the screen."""
    page = operator.page
    keyboard.go("m", "Models")
    keyboard.press(page.get_by_role("link", name="New model"))
    expect(page.get_by_label("Name or address")).to_be_focused()
    keyboard.fill("Name or address", "ftp://org/model")
    expect(page.locator("#error-source")).to_contain_text("it must be hf://ORG/NAME")
    page.keyboard.press("ControlOrMeta+a")
    keyboard.fill("Name or address", "org/model")
    keyboard.choose("Engine", "sim")
    expect(page.locator("#wizard-yaml")).to_contain_text("source: hf://org/model")
    expect(page.locator("#wizard-yaml")).to_contain_text("engine: sim")
    assert barriers_of(operator) == []
    keyboard.press(page.get_by_role("button", name="Apply"))
    keyboard.arrived("hf://org/model@main")
    keyboard.press(page.get_by_role("link", name="Set up model@1"))
    keyboard.arrived("Change draft")
    keyboard.fill("Reason for none", "a first try")
    expect(page.locator("#facts-checks")).to_contain_text("can be validated")
    assert barriers_of(operator) == []
    keyboard.press(page.get_by_role("button", name="Apply"))
    keyboard.arrived("model@1")
    keyboard.press(page.get_by_role("link", name="Deploy", exact=True))
    keyboard.arrived("New deployment")
    keyboard.press(page.get_by_role("button", name="Review"))
    expect(page.locator("#wizard-check")).to_contain_text("Predicted effect on model")
    assert barriers_of(operator) == []
    keyboard.press(page.get_by_role("button", name="Apply"))
    keyboard.arrived("model")
    expect(page.locator("#deployment-state .state")).to_have_text("serving")
    keyboard.press(page.get_by_role("link", name="Try it"))
    keyboard.arrived("Playground")
    keyboard.fill("Message", "Who are you?")
    page.keyboard.press("Enter")
    keyboard.clicks += 1
    expect(page.locator("[data-part=request]")).to_have_text(re.compile("^[0-9a-f-]{36}$"))
    expect(page.locator(".by-assistant p")).not_to_be_empty()
    expect(page.locator("[data-part=cell]")).to_have_text(re.compile("^model-"))
    assert keyboard.clicks <= 12
    assert barriers_of(operator) == []


@pytest.fixture
def slow(fleet: RunningFleet) -> Iterator[str]:
    """A cell whose steps take longer than those of its siblings."""
    cells = fleet.cells(deployment="sim-70b", region=REGIONS[0], state="ready")
    name = min(cells)
    node = cells[name]["nodes"][0]["id"]

    def engine_words() -> list[str] | None:
        found = [process.cmdline() for process in agent_and_engine(node, home=fleet.home)]
        return next((words for words in found if "--admin-port" in words), None)

    words = eventually(engine_words)
    fault = f"http://127.0.0.1:{words[words.index('--admin-port') + 1]}/fault"
    httpx.post(fault, json=SLOW).raise_for_status()
    yield name
    with suppress(httpx.TransportError):  # the fleet may have replaced it
        httpx.delete(fault)


@pytest.mark.long
def test_the_slowest_cell_is_found_and_why_it_is_slow(
    fleet: RunningFleet, slow: str, operator: Watched, keyboard: Keyboard
) -> None:
    def slowest() -> str:
        loads = {name: (cell["load"] or {}).get("ttft_p99_ms") or 0 for name, cell in fleet.cells().items()}
        return max(loads, key=lambda name: loads[name])

    eventually(lambda: slowest() == slow)
    keyboard.go("c", "Cells")
    heading = operator.page.get_by_role("link", name="TTFT p99")
    keyboard.press(heading)
    expect(operator.page.locator("th[aria-sort=ascending]")).to_have_text("TTFT p99")
    keyboard.press(heading)
    expect(operator.page.locator("th[aria-sort=descending]")).to_have_text("TTFT p99")
    keyboard.press(operator.page.locator("tbody tr").first.locator("[data-row]"))
    keyboard.arrived(slow)
    expect(operator.page.locator("#cell-siblings .reason")).to_contain_text("Worse than every sibling in")
    expect(operator.page.locator("#cell-siblings .reason")).to_contain_text("decode")
    assert keyboard.clicks <= 4
    assert barriers_of(operator) == []


@pytest.fixture
def died(fleet: RunningFleet) -> Any:
    """The incident of a node's death that took a cell along and healed."""
    cell = next(iter(fleet.cells(deployment="sim-70b", region=REGIONS[1], state="ready").values()))
    node = cell["nodes"][0]["id"]
    fleet.take_down(node)
    return eventually(lambda: fleet.api("incidents", node=node, state="closed")["results"])[0]


@pytest.mark.long
def test_a_death_is_followed_its_story_exported_and_the_time_before_it_shown(
    died: Any, operator: Watched, keyboard: Keyboard, tmp_path: Path
) -> None:
    page = operator.page
    keyboard.press(page.locator("#status .beside a").last)
    keyboard.arrived("Incidents")
    keyboard.press(page.locator(f"#incident-{died['id']} [data-row]"))
    keyboard.arrived(died["summary"])
    expect(page.locator("#incident-story")).to_contain_text("Detection")
    expect(page.locator("#incident-story")).to_contain_text("Recovery")
    with page.expect_download() as download:
        keyboard.press(page.get_by_role("link", name="Report (Markdown)"))
    download.value.save_as(tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text()
    assert died["summary"] in report
    assert died["cell"] in report
    assert keyboard.clicks <= 4
    assert barriers_of(operator) == []

    operator.open(f"/cells/{died['cell']}/")
    keyboard.clicks = 0
    keyboard.press(page.locator("#cell-time-line-table summary"))
    spans = page.locator("#cell-time-line-table tbody tr").filter(has_text="State")
    lost = spans.filter(has=page.locator(".state", has_text="lost")).last
    expect(lost).to_be_visible()
    since = lost.locator("a").first
    keyboard.press(since)
    keyboard.arrived("Cells")
    then = page.locator("#cells-then tr").filter(has_text=died["cell"])
    expect(then.locator(".state")).to_have_text("lost")
    keyboard.press(page.get_by_role("link", name="Previous change"))
    expect(then.locator(".state")).to_have_text("ready")
    expect(page.locator("#past")).to_contain_text("As it was at")
    assert keyboard.clicks <= 4
    assert barriers_of(operator) == []


@pytest.mark.long
def test_a_gate_refuses_and_says_why(fleet: RunningFleet, operator: Watched, keyboard: Keyboard) -> None:
    asked = {"deployment": "sim-70b", "version": "sim-70b@bad-slow", "policy": GATED, "allow_unreleased": True}
    rollout = fleet.post("rollouts", asked)["id"]
    eventually(lambda: fleet.api(f"rollouts/{rollout}")["state"] == "rolled_back")
    keyboard.go("r", "Rollouts")
    keyboard.press(operator.page.locator("main [data-row]").first)
    keyboard.arrived(f"Rollout {rollout} of sim-70b")
    expect(operator.page.locator("#rollout .headline")).to_contain_text("times the old version's")
    worse = operator.page.locator("#rollout tr.tone-bad")
    expect(worse.first).to_contain_text("worse")
    assert keyboard.clicks <= 3
    assert barriers_of(operator) == []


@pytest.mark.long
def test_a_node_is_drained_and_replaced_from_its_page(
    fleet: RunningFleet, operator: Watched, keyboard: Keyboard
) -> None:
    cell = next(iter(fleet.cells(deployment="sim-70b", region=REGIONS[1], state="ready").values()))
    node = cell["nodes"][1]["id"]
    page = operator.page
    operator.open(f"/nodes/{node}/")
    keyboard.arrived(node)
    page.keyboard.press("a")
    keyboard.clicks += 1
    keyboard.press(page.locator("#actions").get_by_role("link", name="Replace", exact=True))
    expect(page.locator("form")).to_contain_text(f"Its cell {cell['id']} is drained")
    assert barriers_of(operator) == []
    keyboard.fill("Reason", "its disk is slow")
    keyboard.fill("to confirm", node)
    keyboard.press(page.get_by_role("button", name="Replace"))
    keyboard.arrived(node)
    expect(page.locator("#node-state")).to_contain_text("retired")
    assert keyboard.clicks <= 4
    fleet.wait_until_whole()
    after = fleet.cells()[cell["id"]]
    assert node not in {each["id"] for each in after["nodes"]}
    assert after["generation"] > cell["generation"]
    assert barriers_of(operator) == []
