"""What each application key asked of this ingress since its worker started, as reports tell it. Pure.

Thousands of keys do not fit into one report, so reports show them in turns; all counts are totals, so one that is seen
late or twice counts no less and no more.
"""

import re
from collections.abc import Mapping

from engine_agent.protocol.messages import JsonObject

COMMAND = "show table keys"
COUNT_EVERY_S = 5.0
"""How old counts may be. Reading those of 20,000 keys takes about 50 ms."""
KEYS_PER_TURN = 2000
"""At some 40 bytes each, well below the limit of a frame."""
TURN_S = 15.0
"""Three times the time after which the control plane looks again, so that it misses none."""
_ENTRY = re.compile(r"key=(\S+) .*\bhttp_req_cnt=(\d+) http_fail_cnt=(\d+) gpc0=(\d+)")

Counts = Mapping[str, tuple[int, int, int]]
"""Prefix of a key -> its requests, those over a limit among them, and those answered with 5xx."""


def read_key_counts(text: str) -> dict[str, tuple[int, int, int]]:
    """The answer to `COMMAND`."""
    found = (_ENTRY.search(line) for line in text.splitlines())
    return {entry[1]: (int(entry[2]), int(entry[4]), int(entry[3])) for entry in found if entry}


class KeyCounts:
    """The counts of one worker and whose turn it is. `worker` names one life of a worker, on this machine."""

    def __init__(self) -> None:
        self._worker = ""
        self._counts: Counts = {}
        self._counted_at_s = -COUNT_EVERY_S
        self._turn_began_s = 0.0
        self._first = 0

    def is_due(self, worker: str, now_s: float) -> bool:
        return worker != self._worker or now_s >= self._counted_at_s + COUNT_EVERY_S

    def take(self, worker: str, counts: Counts, now_s: float) -> None:
        self._worker, self._counts, self._counted_at_s = worker, counts, now_s

    def told(self, now_s: float) -> JsonObject:
        """The part of a report that is about keys; empty while none was used."""
        if not self._counts:
            return {}
        if now_s >= self._turn_began_s + TURN_S:
            self._turn_began_s = now_s
            self._first = self._first + KEYS_PER_TURN if self._first + KEYS_PER_TURN < len(self._counts) else 0
        shown = sorted(self._counts)[self._first : self._first + KEYS_PER_TURN]
        return {"since": self._worker, "totals": {prefix: list(self._counts[prefix]) for prefix in shown}}
