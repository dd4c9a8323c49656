"""What happened from an empty install to answers, as a file that a person reads: each step of `lab cloud up`, and each
event of the fleet, in order of time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.hosts.topology import NoLaboratory

NAME = "cloud-trail.txt"
"""In SWITCHYARD_HOME."""
ANSWERED_WITHIN_S = 60.0
PAGE = "events/?page_size=500"


@dataclass(frozen=True, slots=True)
class Happened:
    """`what`: `step` of the command, or the kind of an event."""

    at: datetime
    what: str
    text: str


class Trail:
    """The steps of one run, which are also said. `now`: the time of day."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._say, self._now = say, now
        self._steps: list[Happened] = []

    def say(self, text: str) -> None:
        self._steps.append(Happened(self._now(), "step", text))
        self._say(text)

    def write(self, path: Path, ask: Callable[[str, str], Any]) -> None:
        """The steps so far with the fleet's events among them. `ask`: its REST API, by method and path; where it does
        not answer, the file says so."""
        events: list[Happened] = []
        try:
            events = [event_of(row) for row in _pages(ask)]
        except NoLaboratory as error:
            self._steps.append(Happened(self._now(), "step", f"events could not be read: {error}"))
        path.write_text(text_of([*self._steps, *events]))


def event_of(row: Mapping[str, Any]) -> Happened:
    return Happened(datetime.fromisoformat(row["at"]).astimezone(UTC), row["kind"], row["message"])


def text_of(happened: Iterable[Happened]) -> str:
    """A line each, in order of time: the time of day in UTC, seconds since the first, what, and its text."""
    ordered = sorted(happened, key=lambda one: one.at)
    width = max((len(one.what) for one in ordered), default=0)
    return "".join(
        f"{one.at:%H:%M:%S} {(one.at - ordered[0].at).total_seconds():8.1f} s  {one.what:<{width}}  {one.text}\n"
        for one in ordered
    )


def streamed(base_url: str, model: str) -> str:
    """An answer, streamed to the `openai` client as to any application.

    Raises:
        NoLaboratory: nobody answered, or it broke off.
    """
    from openai import OpenAI, OpenAIError  # half a second, which other commands need not take

    try:
        with OpenAI(base_url=base_url, api_key="none", timeout=ANSWERED_WITHIN_S, max_retries=0) as client:
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=16,
                stream=True,
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    except OpenAIError as error:
        raise NoLaboratory(str(error)) from None


def _pages(ask: Callable[[str, str], Any]) -> Iterable[Mapping[str, Any]]:
    path: str | None = PAGE
    while path:
        page = ask("GET", path)
        yield from page["results"]
        path = page["next"] and f"events/?{str(page['next']).partition('?')[2]}"
