"""The life of a batch: its states, validation of create requests, OpenAI's format, the order of work, and whether a new
batch can meet its deadline. Pure. Every line has one terminal outcome (I14), and a batch ends once, in one of four
states.

Tenants take turns, and within a tenant the batch with the least slack comes first. Slack is the time to the deadline
less the time that the remaining lines take at the present rate; a higher priority counts as less slack."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from kernel.tones import Tone
from traffic.files.planner import FILE_ID, expiry_seconds
from traffic.tenants.planner import ApplicationRefused, BadObjectUri, ObjectUri, parse_object_uri

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
USUAL_WINDOW = "24h"
WINDOW = re.compile(r"([1-9][0-9]{0,3})(m|h|d)")
WINDOW_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 600, 7 * 86_400
HIGHEST_PRIORITY = 9
USUAL_PRIORITY = 5
OUR_MEMBERS = ("completion_window", "input_uri", "output_uri", "priority", "sinks")
SINKS_MOST = 5
SINK_NAME = re.compile(r"[-a-zA-Z0-9_]{1,64}")


class BatchState(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ALLOWED: Mapping[BatchState, frozenset[BatchState]] = {
    BatchState.VALIDATING: frozenset({BatchState.IN_PROGRESS, BatchState.FAILED, BatchState.CANCELLING}),
    BatchState.IN_PROGRESS: frozenset({BatchState.FINALIZING, BatchState.CANCELLING, BatchState.FAILED}),
    BatchState.FINALIZING: frozenset({BatchState.COMPLETED, BatchState.EXPIRED, BatchState.FAILED}),
    BatchState.CANCELLING: frozenset({BatchState.CANCELLED, BatchState.FAILED}),
    BatchState.COMPLETED: frozenset(),
    BatchState.FAILED: frozenset(),
    BatchState.EXPIRED: frozenset(),
    BatchState.CANCELLED: frozenset(),
}
"""Next states by state. An expired batch is finalized with the outcomes it has. Once in progress, it fails only if its
files in the store are lost."""
ENDED = frozenset(state for state, following in ALLOWED.items() if not following)
OPEN = frozenset(BatchState) - ENDED
MERGING = frozenset({BatchState.FINALIZING, BatchState.CANCELLING})
"""No lines are sent; outcomes are merged into files."""
BATCH_TONE: dict[BatchState, Tone] = {
    BatchState.VALIDATING: Tone.MOVING,
    BatchState.IN_PROGRESS: Tone.MOVING,
    BatchState.FINALIZING: Tone.MOVING,
    BatchState.CANCELLING: Tone.MOVING,
    BatchState.COMPLETED: Tone.OK,
    BatchState.FAILED: Tone.BAD,
    BatchState.EXPIRED: Tone.WARN,
    BatchState.CANCELLED: Tone.IDLE,
}
STAMPS: dict[BatchState, str] = {
    BatchState.IN_PROGRESS: "in_progress_at",
    BatchState.FINALIZING: "finalizing_at",
    BatchState.CANCELLING: "cancelling_at",
    BatchState.COMPLETED: "completed_at",
    BatchState.FAILED: "failed_at",
    BatchState.EXPIRED: "expired_at",
    BatchState.CANCELLED: "cancelled_at",
}
"""Column with the time at which a state was entered."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Limits of batches. Seconds unless the name says otherwise."""

    max_lines: int = 10_000_000
    """`SWITCHYARD_BATCH_LINES`. Also limits the embedding inputs of all lines together."""
    max_models: int = 100
    """Of a batch. Each has its own window of lines in flight."""
    shard_lines: int = 50_000
    shard_bytes: int = 64 * 1024 * 1024
    """Size of a shard, which is validated in memory as a whole."""
    part_ranges: int = 250
    """Ranges that are merged in one step while a batch is finalized: at most 50,000 lines."""
    turn_s: float = 5.0
    """After this time another batch may be validated or finalized, between two shards or parts."""
    max_line_bytes: int = 1024 * 1024
    """Same limit as near-real-time requests."""
    max_answer_bytes: int = 4 * 1024 * 1024
    max_open_per_tenant: int = 100
    kept_s: float = 30 * 86_400.0
    """How long a batch can be read after its deadline."""
    range_lines: int = 200
    range_bytes: int = 4 * 1024 * 1024
    """Size of a range, which is leased and held in memory as a whole."""
    ranges_at_once: int = 16
    """Per process: at most 64 MiB of requests."""
    lease_s: float = 9.0
    """Detects a dead process after this time; a live one renews three times within it."""
    renew_every_s: float = 3.0
    poll_s: float = 0.5
    quiet_after_s: float = 60.0
    quiet_poll_s: float = 2.0
    """Poll interval after `quiet_after_s` without a batch."""
    sync_every_s: float = 0.2
    """Outcomes are on disk after this time; a crash causes later ones to be sent again."""
    first_retry_s: float = 1.0
    longest_retry_s: float = 60.0
    max_failures: int = 5
    """Attempts of a line that an engine may have started without finishing."""
    max_validations: int = 3
    """Failed attempts to validate a batch. Attempts while the store or database is unavailable do not count."""
    max_line_errors: int = 100
    """Errors of a rejected input that the batch lists."""
    max_error_lines: int = 10_000
    """Errors in its error file; validation stops there."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A validated create request. `window` is the text to show. The input is either `input_file_id` or `input_uri`."""

    input_file_id: str
    endpoint: str
    window: str
    window_s: int
    priority: int = USUAL_PRIORITY
    metadata: dict[str, str] = field(default_factory=dict)
    output_kept_s: int | None = None
    input_uri: ObjectUri | None = None
    output_uri: ObjectUri | None = None
    sinks: tuple[str, ...] = ()

    def expires_at(self, now: datetime) -> datetime:
        return now + timedelta(seconds=self.window_s)


def parse_new_batch(payload: object) -> NewBatch:
    """Reads a create request's body. Raises ApplicationRefused if a field is missing, unknown or invalid; the text says
    what is valid."""
    if not isinstance(payload, dict):
        raise ApplicationRefused(400, "invalid_json", "the request body must be a JSON object")
    known = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "switchyard"}
    if unknown := sorted(payload.keys() - known):
        name = str(unknown[0])[:80]
        message = f"Unknown parameter: `{name}`; known: {', '.join(sorted(known))}"
        raise ApplicationRefused(400, "unknown_parameter", message, name)
    endpoint = payload.get("endpoint")
    if endpoint not in ENDPOINTS:
        raise ApplicationRefused(400, "invalid_value", f"`endpoint` must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if payload.get("completion_window") != USUAL_WINDOW:
        message = f"`completion_window` must be {USUAL_WINDOW}; use `switchyard.completion_window` for others"
        raise ApplicationRefused(400, "invalid_value", message, "completion_window")
    ours = _extension_fields(payload.get("switchyard"))
    window = ours.get("completion_window", USUAL_WINDOW)
    input_uri = _object_uri(ours, "input_uri", is_object=True)
    return NewBatch(
        input_file_id=_input_file(payload.get("input_file_id"), input_uri),
        input_uri=input_uri,
        output_uri=_object_uri(ours, "output_uri"),
        endpoint=str(endpoint),
        window=str(window),
        window_s=_window_s(window),
        priority=_parsed_priority(ours.get("priority", USUAL_PRIORITY)),
        metadata=_parsed_metadata(payload.get("metadata")),
        sinks=_parsed_sinks(ours.get("sinks")),
        output_kept_s=_output_kept_s(payload.get("output_expires_after")),
    )


def _extension_fields(stated: object) -> dict[str, Any]:
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise ApplicationRefused(400, "invalid_value", "`switchyard` must be an object", "switchyard")
    if unknown := sorted(stated.keys() - set(OUR_MEMBERS)):
        name = f"switchyard.{str(unknown[0])[:80]}"
        message = f"Unknown parameter: `{name}`; known: {', '.join(OUR_MEMBERS)}"
        raise ApplicationRefused(400, "unknown_parameter", message, name)
    return stated


def _input_file(stated: object, uri: ObjectUri | None) -> str:
    """OpenAI's client requires a value; with `input_uri` it is the empty text."""
    if uri is not None and stated in (None, ""):
        return ""
    if uri is not None:
        message = "a batch has one input: `switchyard.input_uri` needs an empty `input_file_id` or none"
        raise ApplicationRefused(400, "invalid_value", message, "input_file_id")
    if not isinstance(stated, str) or not FILE_ID.fullmatch(stated):
        message = "`input_file_id` must be the id of an uploaded file, file-…"
        raise ApplicationRefused(400, "invalid_value", message, "input_file_id")
    return stated


def _object_uri(ours: Mapping[str, Any], name: str, *, is_object: bool = False) -> ObjectUri | None:
    stated = ours.get(name)
    if stated is None:
        return None
    try:
        if not isinstance(stated, str):
            raise BadObjectUri("must be a string, s3://bucket/key")
        return parse_object_uri(stated, is_object=is_object)
    except BadObjectUri as bad:
        raise ApplicationRefused(400, "invalid_value", f"`switchyard.{name}` {bad}", f"switchyard.{name}") from bad


def _parsed_sinks(stated: object) -> tuple[str, ...]:
    names = [] if stated is None else stated
    is_list = isinstance(names, list) and len(names) <= SINKS_MOST
    if not is_list or not all(isinstance(name, str) and SINK_NAME.fullmatch(name) for name in names):  # type: ignore[attr-defined]
        message = f"`switchyard.sinks` must be at most {SINKS_MOST} names of sinks"
        raise ApplicationRefused(400, "invalid_value", message, "switchyard.sinks")
    return tuple(dict.fromkeys(names))  # type: ignore[call-overload]


def _window_s(stated: object) -> int:
    found = WINDOW.fullmatch(stated) if isinstance(stated, str) else None
    seconds = int(found[1]) * WINDOW_UNITS_S[found[2]] if found else 0
    if not SHORTEST_WINDOW_S <= seconds <= LONGEST_WINDOW_S:
        message = "`switchyard.completion_window` must be minutes, hours or days from 10m to 7d, such as 90m, 4h or 2d"
        raise ApplicationRefused(400, "invalid_value", message, "switchyard.completion_window")
    return seconds


def _parsed_priority(stated: object) -> int:
    if not isinstance(stated, int) or isinstance(stated, bool) or not 0 <= stated <= HIGHEST_PRIORITY:
        message = f"`switchyard.priority` must be a whole number from 0 to {HIGHEST_PRIORITY}, the most urgent"
        raise ApplicationRefused(400, "invalid_value", message, "switchyard.priority")
    return stated


def _parsed_metadata(stated: object) -> dict[str, str]:
    pairs = {} if stated is None else stated
    is_right = isinstance(pairs, dict) and len(pairs) <= MAX_METADATA
    if not is_right or not all(_is_pair(key, value) for key, value in pairs.items()):  # type: ignore[attr-defined]
        message = (
            f"`metadata` must be at most {MAX_METADATA} pairs of text: names of {MAX_METADATA_KEY} letters, "
            f"values of {MAX_METADATA_VALUE}"
        )
        raise ApplicationRefused(400, "invalid_value", message, "metadata")
    return pairs  # type: ignore[return-value]


def _is_pair(key: object, value: object) -> bool:
    if not isinstance(key, str) or not isinstance(value, str):
        return False
    return len(key) <= MAX_METADATA_KEY and len(value) <= MAX_METADATA_VALUE and "\0" not in key + value


def _output_kept_s(stated: object) -> int | None:
    if stated is None:
        return None
    if not isinstance(stated, dict):
        message = "`output_expires_after` must have anchor and seconds"
        raise ApplicationRefused(400, "invalid_value", message, "output_expires_after")
    return expiry_seconds(stated.get("anchor"), stated.get("seconds"), "output_expires_after")


@dataclass(frozen=True, slots=True)
class Tally:
    """Lines with an outcome, and their token usage."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: "Tally") -> "Tally":
        return Tally(
            self.completed + other.completed,
            self.failed + other.failed,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def usage_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


MOST_KINDS = 1000
"""Distinct errors that are counted."""
COUNTS = tuple(each.name for each in fields(Tally))


@dataclass
class Merged:
    """Progress of finalizing a long batch, stored after each part. A part is named by the lease that wrote it, so a
    process that lost its lease overwrites nothing. Ranges below `following` are merged. `parts` lists files by kind of
    result, in order; `errors` counts error lines by code and message."""

    following: int = 0
    parts: dict[str, list[str]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count_error(self, key: tuple[str, str]) -> None:
        if key in self.errors or len(self.errors) < MOST_KINDS:
            self.errors[key] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "following": self.following,
            "parts": self.parts,
            "tally": {name: getattr(self.tally, name) for name in COUNTS},
            "errors": [[code, message, count] for (code, message), count in self.errors.items()],
        }


def merged_from(stored: Mapping[str, Any]) -> Merged:
    """Returns stored progress; of an empty one, that of a batch without any."""
    if not stored:
        return Merged()
    return Merged(
        following=stored["following"],
        parts={kind: list(names) for kind, names in stored["parts"].items()},
        tally=Tally(**stored["tally"]),
        errors=Counter({(code, message): count for code, message, count in stored["errors"]}),
    )


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a file or line failed. `line` counts from 1; None means the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


def batch_not_found(batch_id: str) -> ApplicationRefused:
    return ApplicationRefused(404, "batch_not_found", f"No batch found with id '{batch_id[:80]}'.", "batch_id")


def cancel_refusal(state: BatchState) -> ApplicationRefused | None:
    """Returns why a batch in this state cannot be cancelled; None if it can, or is being cancelled."""
    if state in {BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.CANCELLING, BatchState.CANCELLED}:
        return None
    message = f"Cannot cancel a batch with status '{state}'."
    return ApplicationRefused(409, "batch_not_cancellable", message)


PRIORITY_FACTOR = 1.5
"""Each step of priority scales the slack by a third, so it never outweighs a batch without slack."""
RESERVE = 0.9
"""Share of a measured rate that estimates rely on."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Lines of one model of an open batch; `remaining` have no outcome. `rate` is lines per second of the model in the
    region, 0 if unknown."""

    id: str
    tenant: str
    region: str
    model: str
    remaining: int
    expires_at: datetime
    priority: int = USUAL_PRIORITY
    rate: float = 0.0

    @property
    def target(self) -> str:
        """The model and region that may be overloaded."""
        return f"{self.region} {self.model}"

    def slack_s(self, now: datetime) -> float:
        work_s = self.remaining / self.rate if self.rate > 0 else 0.0
        return (self.expires_at - now).total_seconds() - work_s

    def urgency(self, now: datetime) -> float:
        """Sort key, most urgent first. Priority shrinks positive slack and enlarges negative slack."""
        slack_s = self.slack_s(now)
        factor = PRIORITY_FACTOR ** (USUAL_PRIORITY - self.priority)
        return slack_s * factor if slack_s >= 0 else slack_s / factor


def plan_order(jobs: Iterable[BatchJob], now: datetime) -> tuple[BatchJob, ...]:
    """Returns jobs in the order of service: the most urgent of each tenant, then the second of each."""
    turns: dict[str, int] = {}
    ranked = []
    for job in sorted(jobs, key=lambda job: (job.urgency(now), job.id, job.model)):
        turn = turns[job.tenant] = turns.get(job.tenant, -1) + 1
        ranked.append((turn, job.urgency(now), job.id, job.model, job))
    return tuple(job for *_, job in sorted(ranked, key=lambda each: each[:4]))


def feasible_s(lines: int, ahead: int, rate: float) -> float | None:
    """Returns the seconds until these lines are done after `ahead` others; None without a measured rate."""
    return (lines + ahead) / (rate * RESERVE) if rate > 0 else None


def window_text(seconds: float) -> str:
    """Returns the shortest completion window of at least `seconds`, in the API's format."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes}m" if minutes < 120 else f"{math.ceil(minutes / 60)}h"


def deadline_refusal(
    *, asked_s: float, lines: int, ahead: int, rate: float, is_usual: bool, planned_s: float | None = None
) -> str | None:
    """Returns why a batch cannot meet its deadline, and which window it can meet. Returns None if it can, if no rate is
    known, or for the default window, which clients cannot choose. `planned_s` is when the plan of the day has room for
    it and those ahead; None to use the past rate."""
    needed_s = feasible_s(lines, ahead, rate) if planned_s is None else planned_s
    if needed_s is None or needed_s <= asked_s or is_usual:
        return None
    by = f"at {rate:.3g} lines a second" if planned_s is None else "in the planned capacity"
    window = window_text(needed_s)
    return f"{lines} lines behind {ahead} others cannot be done in that time {by}; use a window of {window}"


def estimated_end(remaining: int, rate: float, now: datetime) -> datetime | None:
    return now + timedelta(seconds=remaining / rate) if rate > 0 else None
