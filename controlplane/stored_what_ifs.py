"""The last answers of what-if pages, stored in Valkey, so that a visit shows one without computing it. A page shows
when and for whom it was computed, and whether its documents or the fleet have changed since. Without Valkey each answer
is shown once."""

import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import redis
from django.conf import settings
from django.http import QueryDict

from controlplane.forecast_budget import FORECASTS
from controlplane.stress import LEAST_FACTOR, MOST_FACTOR, Question, WhatIf, question_of
from controlplane.what_if import HasTime
from fleet.regions.models import Region
from kernel.circuit_breaker import CircuitBreaker
from kernel.refusals import Refusal
from traffic.region_shares.selectors.expected_load import expected_load_inputs

DRAFTS_KEPT_S, PRESENT_KEPT_S = 7 * 86_400, 600
"""Each question about the present fleet has its own entry, so those are short-lived."""
REPLY_LIMIT_S = 0.2
"""A reachable server needs well below a millisecond."""
BREAKER = CircuitBreaker(pause_s=2.0)
ASKING = frozenset({"factor", "lost", "simulate"})
"""Parameters of a URL that contains a question."""
Compute = Callable[[Question, HasTime], WhatIf]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredWhatIf:
    """`question`: as it was asked, with unknown regions. `inputs`: fingerprint of each thing that the answer depends
    on."""

    question: Question
    answer: WhatIf
    at: datetime
    by: str
    inputs: dict[str, str]


@dataclass(frozen=True, slots=True)
class WhatIfPanel:
    """A question with its answer, if it was computed. `outdated`: what has changed since, or ""; `refused`: why no new
    answer was computed, or ""."""

    question: Question
    regions: tuple[str, ...]
    stored: StoredWhatIf | None
    outdated: str = ""
    refused: str = ""
    least_factor: float = LEAST_FACTOR
    most_factor: float = MOST_FACTOR

    @property
    def answers_other(self) -> bool:
        """Whether the answer is one to another question, because a new one was refused."""
        return self.stored is not None and self.stored.question != self.question

    @property
    def again(self) -> str:
        """Names the shown answer in a form that computes another one; a reload of its result computes none."""
        return self.stored.at.isoformat() if self.stored else ""


def what_if_panel(
    filters: QueryDict, *, name: str, user: str, now: datetime, compute: Compute, documents: str | None = None
) -> WhatIfPanel:
    """The answer that is stored under `name`. `again` in the URL names a stored answer that a new one replaces.

    With `documents`, the digest of a draft, the last answer is stored, and only a new question in the URL computes one.
    Without, there is one answer for each question, and the first visit after a change of the fleet computes it."""
    question, is_asked = question_of(filters), bool(ASKING & filters.keys())
    inputs = {**({"the draft": documents} if documents is not None else {}), **expected_load_inputs(now)}
    key = name if documents is not None else f"{name}:{_digest(question)}"
    stored = _read(key)
    outdated = _changed_since(stored, inputs)
    if documents is None:
        is_due = stored is None or bool(outdated)
    else:
        is_due = is_asked and (stored is None or stored.question != question)
    refused = ""
    if is_due or (stored is not None and filters.get("again") == stored.at.isoformat()):
        try:
            with FORECASTS.take(user) as has_time:
                answer = compute(question, has_time)
            stored, outdated = StoredWhatIf(question, answer, now, user, inputs), ""
            _keep(key, stored, PRESENT_KEPT_S if documents is None else DRAFTS_KEPT_S)
        except Refusal as refusal:
            refused = str(refusal)
    shown = question if is_asked or stored is None else stored.question
    regions = Region.objects.order_by("position", "name").values_list("name", flat=True)
    return WhatIfPanel(shown, tuple(regions), stored, outdated, refused)


def _changed_since(stored: StoredWhatIf | None, inputs: dict[str, str]) -> str:
    changed = [name for name, text in inputs.items() if stored is not None and stored.inputs.get(name) != text]
    return " and ".join(filter(None, (", ".join(changed[:-1]), *changed[-1:])))


def _digest(question: Question) -> str:
    return hashlib.sha256(repr((question.factor, sorted(question.lost), question.simulate)).encode()).hexdigest()[:16]


def _read(key: str) -> StoredWhatIf | None:
    """Returns None without Valkey, without an answer, or for one of a release with other fields."""
    found = _reached(lambda server: server.get(f"switchyard:what-if:{key}"))
    try:
        return msgspec.json.decode(found, type=StoredWhatIf) if found else None
    except msgspec.DecodeError:
        return None


def _keep(key: str, stored: StoredWhatIf, kept_s: int) -> None:
    _reached(lambda server: server.set(f"switchyard:what-if:{key}", msgspec.json.encode(stored), ex=kept_s))


def _reached(call: Callable[[Any], Any]) -> Any:
    if BREAKER.is_open:
        return None
    try:
        return call(_server())
    except (redis.RedisError, OSError) as error:
        BREAKER.trip()
        log.warning("what-ifs are not stored for %.0f s: %s", BREAKER.pause_s, error)
        return None


@functools.cache
def _server() -> Any:
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=REPLY_LIMIT_S, socket_connect_timeout=REPLY_LIMIT_S, retry=None
    )
