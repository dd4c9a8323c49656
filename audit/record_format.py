"""The contents of audit records: secrets removed by field name and by pattern, bounded length, digests of the chain.
Pure."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

HIDDEN = "(hidden)"
LONGEST_TEXT = 2000
LONGEST_CHANGES = 32 * 1024
"""Maximum length of `changes` as JSON; typical requests have a few kilobytes."""
DEEPEST = 12

LONGEST_NAME = 100
"""Only the end of a longer name is checked, because names of secrets end with a telling word."""

_SECRET_NAME = re.compile(
    r"(?i)(^|[_\-. ])(secrets?|passwords?[12]?|passwd|passphrase|token|credentials?|api[_-]?key|authorization|cookie"
    r"|csrfmiddlewaretoken|private[_-]?key|one[_-]?time[_-]?codes?|access[_-]?key([_-]?id)?)\Z"
)
# Callers choose the length of texts, so each pattern takes linear time (tests/checks/linear_patterns.py).
_OWN_SECRET = re.compile(r"\bsw_([0-9a-f]{4,16})_[0-9a-f]+")
_USER_IN_URL = re.compile(r"\b(\w{1,20}://)[^/\s:@]{1,256}:[^/\s@]{1,512}@")
_PATH_OF_URL = re.compile(r"(\w{1,20}://[^/?#]{1,256})[/?#].")
_PRIVATE_KEY = "PRIVATE KEY"
_SLACK = re.compile(r"(https://hooks\.slack\.com/)\S+")


def is_secret_name(name: str) -> bool:
    """Whether a field with this name is a secret: `secret`, `new_password1`, `HF_TOKEN`; not `max_tokens`."""
    return _SECRET_NAME.search(name[-LONGEST_NAME:]) is not None


def without_secrets(value: Any, depth: int = 0) -> Any:
    """Returns the value for JSON, with every secret replaced."""
    if depth > DEEPEST:
        return "(nested too deeply)"
    if isinstance(value, dict):
        return {
            clean(str(name)): HIDDEN if is_secret_name(str(name)) and part else _without_path(str(name), part, depth)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets(part, depth + 1) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return clean(str(value))


def _without_path(name: str, value: Any, depth: int) -> Any:
    """Returns only scheme and host of a URL, because the path of a webhook is often its secret."""
    if name.casefold().endswith("url"):
        value = _host_only(value)
    return without_secrets(value, depth + 1)


def _host_only(value: Any) -> Any:
    """Returns a value, or the pair of old and new value, with shortened URLs."""
    if isinstance(value, list | tuple):
        return [_host_only(part) for part in value]
    if isinstance(value, dict):
        return {name: _host_only(part) if isinstance(part, str) else part for name, part in value.items()}
    found = _PATH_OF_URL.match(value) if isinstance(value, str) else None
    return f"{found[1]}/…" if found else value


def clean(text: str) -> str:
    """Returns a storable text of bounded length, without secrets of known patterns."""
    if _PRIVATE_KEY in text:  # PEM, complete or not, anywhere in the text
        return HIDDEN
    is_cut = len(text) > LONGEST_TEXT
    if is_cut:  # before the patterns; the last word is dropped, because half of a secret matches no pattern
        text = text[: LONGEST_TEXT - 1]
        text = text[: max(map(text.rfind, " \n\t"))].rstrip() if len(text.split(None, 1)) > 1 else text
    text = text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
    text = _OWN_SECRET.sub(r"sw_\1_…", text)
    text = _SLACK.sub(r"\1…", _USER_IN_URL.sub(r"\1…@", text))
    return text + "…" if is_cut else text


def as_json(changes: dict[str, Any]) -> str:
    """Returns the changes as JSON without secrets. If it is too long, the longest parts are dropped first."""
    shown = {name: without_secrets(part) for name, part in changes.items() if part}
    while len(text := json.dumps(shown, ensure_ascii=False, sort_keys=True, separators=(",", ":"))) > LONGEST_CHANGES:
        longest = max(shown, key=lambda name: len(json.dumps(shown[name])))
        shown[longest] = f"(left out: {len(json.dumps(shown[longest]))} letters)"
    return text


START = 64 * "0"
"""The digest before the first record."""
COVERED = (
    "number", "outcome", "actor", "proof", "address", "token_prefix", "action", "object", "about", "reason",
    "request_id", "changes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChainBreak:
    number: int
    why: str


def record_digest(record: Any) -> str:
    """SHA-256 in hexadecimal over `record.previous`, a line feed and the record's columns as JSON with sorted keys."""
    fields = {name: getattr(record, name) for name in COVERED} | {"at": instant(record.at)}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{record.previous}\n{text}".encode()).hexdigest()


def instant(at: datetime) -> str:
    """Returns the form of a time in digests: UTC, microseconds."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def first_break(records: Iterable[Any], *, after: int, digest: str) -> tuple[ChainBreak | None, int, str]:
    """Walk the records that follow number `after`, whose digest was `digest`.

    Returns the first broken one, if any, and the number and digest of the last good one."""
    number = after
    for record in records:
        if record.number != number + 1:
            return ChainBreak(number + 1, f"it is missing; the next record is {record.number}"), number, digest
        if record.previous != digest:
            return ChainBreak(record.number, f"it does not follow record {number}"), number, digest
        if record_digest(record) != record.digest:
            return ChainBreak(record.number, "its columns do not match its digest"), number, digest
        number, digest = record.number, record.digest
    return None, number, digest
