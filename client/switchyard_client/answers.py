"""Answers, events, near-real-time requests with their callbacks, and errors as callers see them."""

import hmac
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Body = Mapping[str, Any]

CALLBACK_TOLERANCE_S: Final = 300.0
"""Maximum age of a callback, against replays."""
_ENDED = frozenset({"done", "failed", "expired", "cancelled"})
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class SwitchyardError(Exception):
    """Base class of this client's errors."""


class NoAnswer(SwitchyardError):
    """No region sent a byte of an answer; the text has the last attempt of each."""


class DeadlineExceeded(SwitchyardError):
    """The deadline of the call passed first."""


class BrokenOff(SwitchyardError):
    """An answer was incomplete. The received part is valid. The request was not sent again, because it had started, or
    its repeat was another answer."""


class BadCallback(SwitchyardError):
    """A callback that is not from the fleet or is too old. Respond with 400."""


class ApiError(SwitchyardError):
    """A refusal. `retry_after_s` is None if a retry does not help or its time is unknown."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            error = {}
        document = error if isinstance(error, dict) else {"message": error}
        self.status = status
        self.message = str(document.get("message") or body[:500].decode("utf-8", "replace"))
        self.type, self.code, self.param = document.get("type"), document.get("code"), document.get("param")
        self.retry_after_s = _retry_after_s(headers)
        self.request_id = headers.get("x-request-id", "")
        self.budgets = Budget.all_of(headers)
        super().__init__(f"{status} {self.code or self.type or 'refused'}: {self.message}")


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", headers.get(name, "")):
            return float(headers[name]) * unit_s
    return None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request by its engine; `cached_tokens` are those of the prompt that it did not compute."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, body: Body) -> "Usage | None":
        """Reads the usage of an answer or event of OpenAI's, Responses or Anthropic's API; None if it has none."""
        usage = body.get("usage") or (body.get("response") or body.get("message") or {}).get("usage")
        if not isinstance(usage, Mapping):
            return None
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return cls(
            usage.get("prompt_tokens", usage.get("input_tokens")) or 0,
            usage.get("completion_tokens", usage.get("output_tokens")) or 0,
            details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0,
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """One limit of a key, per minute. `reset_s`: seconds until all of it is available again."""

    limit: int
    remaining: int
    reset_s: float

    @classmethod
    def all_of(cls, headers: Mapping[str, str]) -> "dict[str, Budget]":
        """Reads the limits of `requests` and `tokens` in `x-ratelimit-*`; other limits are not set on the key."""
        found = {}
        for kind in ("requests", "tokens"):
            limit, left, reset = (
                headers.get(f"x-ratelimit-{each}-{kind}", "") for each in ("limit", "remaining", "reset")
            )
            if limit.isdecimal() and left.isdecimal():
                reset_s = sum(float(count) * _UNITS_S[unit] for count, unit in _DURATION.findall(reset))
                found[kind] = cls(int(limit), int(left), reset_s)
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. `headers` name region and cell (`X-Switchyard-Region`, `…-Cell`); `attempts`: number of
    attempts."""

    json: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    attempts: int = 1

    @property
    def text(self) -> str:
        """The first choice's text, of chats, completions, responses and messages."""
        for choice in self.json.get("choices") or ():
            return str((choice.get("message") or choice).get("content") or choice.get("text") or "")
        parts = [part for item in self.json.get("output") or () for part in item.get("content") or ()]
        return "".join(part.get("text") or "" for part in (*parts, *(self.json.get("content") or ())))

    @property
    def embeddings(self) -> list[list[float]]:
        """The vectors of `/v1/embeddings`, in the order of the inputs."""
        rows = sorted(self.json.get("data") or (), key=lambda row: row.get("index") or 0)
        return [row["embedding"] for row in rows]

    @property
    def usage(self) -> Usage | None:
        return Usage.of(self.json)

    @property
    def budgets(self) -> dict[str, Budget]:
        return Budget.all_of(self.headers)

    @property
    def region(self) -> str:
        return self.headers.get("x-switchyard-region", "")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. `name`: from its line `event`, empty in OpenAI's chats."""

    name: str
    json: dict[str, Any]

    @property
    def text(self) -> str:
        """The text for the first choice."""
        for choice in self.json.get("choices") or ():
            return str((choice.get("delta") or choice).get("content") or choice.get("text") or "")
        delta = self.json.get("delta")
        if isinstance(delta, str):
            return delta if self.json.get("type") == "response.output_text.delta" else ""
        return str(delta.get("text") or "") if isinstance(delta, Mapping) else ""

    @property
    def usage(self) -> Usage | None:
        return Usage.of(self.json)


@dataclass(frozen=True, slots=True)
class Pending:
    """The last known state of a near-real-time request. `callback_secret` is only in the response that accepts it."""

    id: str
    status: str
    json: dict[str, Any]
    callback_secret: str = field(default="", repr=False)

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED

    @property
    def answer(self) -> Answer | None:
        """The engine's answer, once `status` is done."""
        body = (self.json.get("response") or {}).get("body")
        return None if self.status != "done" or body is None else Answer(body)


def verify_callback(body: bytes, headers: Mapping[str, str], secret: str, *, now: float | None = None) -> Pending:
    """Returns the ended request of a callback; `retrieve` has its answer. `body` is the raw body, `secret` the one of
    `submit`, `now` Unix time.

    Raises:
        BadCallback: not from the fleet, or too old."""
    document = {name.lower(): text for name, text in headers.items()}
    stamp = document.get("x-switchyard-timestamp", "")
    if re.fullmatch(r"[0-9]{1,15}", stamp) is None:
        raise BadCallback("X-Switchyard-Timestamp is missing or not a whole number of seconds")
    right = "sha256=" + hmac.new(secret.encode(), f"{stamp}.".encode() + body, "sha256").hexdigest()
    if not hmac.compare_digest(right.encode(), document.get("x-switchyard-signature", "").encode()):
        raise BadCallback("X-Switchyard-Signature does not match the body, the time and this secret")
    age_s = (time.time() if now is None else now) - int(stamp)
    if abs(age_s) > CALLBACK_TOLERANCE_S:
        raise BadCallback(f"it was signed {age_s:.0f} s ago; at most {CALLBACK_TOLERANCE_S:.0f} s are accepted")
    data = json.loads(body)["data"]
    return Pending(data["id"], data["status"], data)
