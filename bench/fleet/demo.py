"""Shows the demo fleet healing: a killed node, a bad version, a lost region. Prints the story with its times.

    make demo                      # brings the fleet up first
    .venv/bin/python -m bench demo

Needs a fleet from `make up` (same SWITCHYARD_HOME) without other users. Streaming requests go to every region all the
time; the story counts those that failed. Whatever happens, the deployment keeps its version and its cells."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from bench import table
from bench.fleet.live_fleet import HOME, SERVER, Fleet, Row, at, load, wait_for
from lab.steady_load import Answer, node_processes

WHOLE_LIMIT_S = 240.0
ROLLOUT_LIMIT_S = 180.0
POLICY = {"min_healthy_s": 3, "canary_bake_s": 20, "bake_s": 0}
QUIET_S = 5.0
"""Between chapters, so that the events of one do not fall into the next."""
SHOWN = ("cell.", "node.lost", "incident.", "rollout.", "routing.", "region.", "traffic.")
"""Kinds of events in the printed story; the page of events has all."""
LINES_EACH = 24


@dataclass(frozen=True, slots=True)
class Chapter:
    """One part of the story. `began` and `ended` in seconds since the epoch; `answers`: requests that ended since it
    began; `pages`: paths of the dashboard that show more."""

    title: str
    began: float
    ended: float
    events: tuple[Row, ...]
    answers: tuple[Answer, ...]
    pages: tuple[str, ...]

    @property
    def failed(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.error)


def told(chapter: Chapter) -> Iterator[str]:
    """The lines of a chapter: clock time, seconds since it began, and what happened."""
    events = [event for event in chapter.events if event["kind"].startswith(SHOWN)]
    for event in events[:LINES_EACH]:
        clock = datetime.fromtimestamp(at(event)).astimezone().strftime("%H:%M:%S.%f")[:-4]
        yield f"  {clock}  T+{at(event) - chapter.began:5.1f} s  {event['message']}"
    if len(events) > LINES_EACH:
        yield f"  and {len(events) - LINES_EACH} more: {SERVER}/events/"
    took_s = chapter.ended - chapter.began
    yield f"  over after {took_s:.1f} s; {len(chapter.answers)} requests, {len(chapter.failed)} failed"
    yield from (f"  failed, from {answer.cell or 'no cell'}: {answer.error}" for answer in chapter.failed[:LINES_EACH])
    yield from (f"  {SERVER}{page}" for page in chapter.pages)


def summary(chapters: Sequence[Chapter]) -> str:
    head = ("chapter", "seconds", "requests", "failed")
    rows = [
        (chapter.title, f"{chapter.ended - chapter.began:.1f}", str(len(chapter.answers)), str(len(chapter.failed)))
        for chapter in chapters
    ]
    return table(head, rows)


class Demo:
    """Plays chapters on one deployment, and prints each when it is over. `answers` grows while load is sent."""

    def __init__(self, fleet: Fleet, deployment: str, answers: list[Answer]) -> None:
        self._fleet = fleet
        self._deployment = deployment
        self._answers = answers

    def play(self, title: str, act: Callable[[], tuple[str, ...]]) -> Chapter:
        """Runs `act`, which returns the pages to look at, and waits until every cell is ready again."""
        print(f"\n{title}", flush=True)
        mark, began, began_s = self._fleet.last_event(), time.time(), time.monotonic()
        pages = act()
        wait_for(self._is_whole, WHOLE_LIMIT_S, f"every cell of {self._deployment} is ready")
        ended = time.time()
        time.sleep(QUIET_S)
        over = tuple(answer for answer in self._answers if answer.ended >= began_s)
        events = tuple(self._fleet.events(mark))
        incidents = dict.fromkeys(f"/incidents/{number}/" for number in self._incidents_since(began))
        chapter = Chapter(title, began, ended, events, over, (*pages, *incidents))
        print("\n".join(told(chapter)), flush=True)
        return chapter

    def kill_node(self) -> tuple[str, ...]:
        """kill -9 of all processes of a cell's leader."""
        cell = self._ready_cells()[0]
        leader = next(node["id"] for node in cell["nodes"] if node["rank"] == 0)
        self._kill([leader])
        self._wait_for_change([cell])
        return (f"/cells/{cell['id']}/",)

    def roll_out_bad(self) -> tuple[str, ...]:
        """A version that answers wrong: it reaches one cell and is rolled back."""
        version = f"{self._deployment}@bad-answer"
        request = {"version": version, "policy": POLICY, "allow_unreleased": True, "why": "make demo"}
        number = int(self._fleet.post("rollouts", deployment=self._deployment, **request)["id"])

        def is_over() -> bool:
            return self._fleet.get(f"rollouts/{number}")["state"] in {"rolled_back", "succeeded", "aborted"}

        wait_for(is_over, ROLLOUT_LIMIT_S, f"rollout {number} ends")
        return (f"/rollouts/{number}/",)

    def lose_region(self) -> tuple[str, ...]:
        """kill -9 of all processes of every node of one region: its traffic goes to the other one and returns."""
        cells = self._ready_cells()
        region = cells[-1]["region"]
        lost = [cell for cell in cells if cell["region"] == region]
        self._kill([node["id"] for cell in lost for node in cell["nodes"]])
        self._wait_for_change(lost)
        return (f"/regions/{region}/", "/traffic/")

    def _ready_cells(self) -> list[Row]:
        return sorted(
            self._fleet.rows("cells", deployment=self._deployment, state="ready"), key=lambda cell: cell["id"]
        )

    def _is_whole(self) -> bool:
        return self._fleet.is_whole(self._deployment)

    def _wait_for_change(self, cells: Sequence[Row]) -> None:
        """Waits until the control plane has noticed: each cell has another generation or state."""
        before = {cell["id"]: (cell["generation"], cell["state"]) for cell in cells}

        def have_changed() -> bool:
            now = self._fleet.cells(self._deployment)
            return all(
                name not in now or (now[name]["generation"], now[name]["state"]) != was for name, was in before.items()
            )

        wait_for(have_changed, WHOLE_LIMIT_S, f"{', '.join(before)} noticed as lost", poll_s=0.05)

    def _incidents_since(self, began: float) -> list[int]:
        opened = (self._fleet.rows("incidents", state=state) for state in ("open", "closed"))
        since = [
            row for rows in opened for row in rows if datetime.fromisoformat(row["opened_at"]).timestamp() >= began
        ]
        return sorted(int(row["id"]) for row in since)

    @staticmethod
    def _kill(nodes: Sequence[str]) -> None:
        victims = [process for node in nodes for process in node_processes(node, home=HOME)]
        if not victims:
            raise SystemExit(f"no process of {', '.join(nodes)} runs on this machine with the home {HOME}")
        for victim in victims:
            victim.kill()


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deployment", default="sim-70b", help="one with the version bad-answer")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second to each region")
    options = parser.parse_args()
    fleet = Fleet()
    began_s = time.monotonic()
    wait_for(lambda: fleet.is_whole(options.deployment), WHOLE_LIMIT_S, f"every cell of {options.deployment} is ready")
    urls = fleet.ingresses(options.deployment)
    print(f"{options.rate:g} streaming requests a second to each of {', '.join(urls)}", flush=True)
    with load(urls, options.deployment, options.rate, max_tokens=24) as answers:
        demo = Demo(fleet, options.deployment, answers)
        chapters = [
            demo.play("A node dies", demo.kill_node),
            demo.play("A bad version is rolled out", demo.roll_out_bad),
            demo.play("A region is lost", demo.lose_region),
        ]
    print(f"\n{summary(chapters)}")
    print(f"\nThe demo took {time.monotonic() - began_s:.0f} s. The fleet keeps running: {SERVER}/incidents/")
    print("Stop it with `make down`.")
