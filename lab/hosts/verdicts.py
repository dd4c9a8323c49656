"""What must hold of a fleet while something happens to one of its hosts, and whether it did. Pure.

Requests fail nowhere; a stream may break off if it ran on a cell of that host, or through it: what crosses regions runs
through two ingresses. Whatever else ran goes on in the same process; no other node is lost.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from lab.hosts.load import Stream

Row = Mapping[str, Any]
RESTARTS = frozenset({"cell.failed", "cell.lost", "cell.starting", "cell.draining", "node.agent_restarted"})
LOSSES = frozenset({"node.lost", "node.faulty"})


@dataclass(frozen=True, slots=True)
class Harmed:
    """What a harm may take away: hosts, and what ran on them when it began. `nodes`: ids of nodes and ingresses."""

    hosts: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    cells: frozenset[str] = frozenset()

    def excuses(self, stream: Stream) -> bool:
        """Whether an answer that had begun ran over what is harmed."""
        ran_over_it = stream.cell in self.cells or stream.host in self.hosts or stream.chosen_by in self.nodes
        return bool(stream.cell) and ran_over_it


@dataclass(frozen=True, slots=True)
class Counts:
    """Streams of a round. `excused`: broke off where the harm was; `later`: answered at another try; `crossed`:
    answered in another region."""

    sent: int
    later: int
    crossed: int
    excused: int
    failed: int
    broken: int

    def __str__(self) -> str:
        return (
            f"{self.sent} streams: {self.failed} failed, {self.broken} broke off elsewhere, {self.excused} broke off "
            f"on what was harmed, {self.later} answered at another try, {self.crossed} in another region"
        )


def count(streams: Iterable[Stream], harmed: Harmed) -> Counts:
    all_of_them = list(streams)
    broken = [stream for stream in all_of_them if stream.error and stream.cell]
    excused = [stream for stream in broken if harmed.excuses(stream)]
    return Counts(
        sent=len(all_of_them),
        later=sum(stream.tries > 1 and not stream.error for stream in all_of_them),
        crossed=sum(bool(stream.cell) and stream.served_in != stream.region for stream in all_of_them),
        excused=len(excused),
        failed=sum(bool(stream.error) and not stream.cell for stream in all_of_them),
        broken=len(broken) - len(excused),
    )


def unexcused(streams: Iterable[Stream], harmed: Harmed) -> list[str]:
    """Why each request failed that must not have, the same reason once."""
    errors = (
        f"{stream.region} through {stream.host}{_on_cell(stream)}: {stream.error}"
        for stream in streams
        if stream.error and not harmed.excuses(stream)
    )
    return list(dict.fromkeys(errors))


def _on_cell(stream: Stream) -> str:
    if not stream.cell:
        return ""
    return f" on {stream.cell}{f' by {stream.chosen_by}' if stream.served_in != stream.region else ''}"


def engines(nodes: Iterable[Row]) -> dict[str, tuple[str, int, int]]:
    """Node -> its cell, and generation and process of its engine, of all that run one."""
    return {
        node["id"]: (node["cell"], node["engine"]["generation"], node["engine"]["pid"])
        for node in nodes
        if node["cell"] and node["engine"]["pid"]
    }


def restarted(
    before: Mapping[str, tuple[str, int, int]], after: Mapping[str, tuple[str, int, int]], harmed: Harmed
) -> list[str]:
    """Engines of other cells that no longer run as they ran."""
    return [
        f"the engine of {cell} on {node} is no longer process {pid} of generation {generation}"
        for node, (cell, generation, pid) in before.items()
        if cell not in harmed.cells and node not in harmed.nodes and after.get(node) != (cell, generation, pid)
    ]


def wrong_events(events: Iterable[Row], harmed: Harmed) -> Iterator[str]:
    """What happened to cells and nodes that nothing was done to."""
    for event in events:
        ours = event["node"] in harmed.nodes or event["cell"] in harmed.cells
        if event["kind"] in RESTARTS | LOSSES and not ours:
            yield f"{event['kind']}: {event['message']}"


def spread(seconds: Collection[float]) -> str:
    """`median 12.3 s (10.1 to 15.0 s of 5)`; times are too few for more."""
    if not seconds:
        return "never"
    return f"median {median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f} s, of {len(seconds)})"
