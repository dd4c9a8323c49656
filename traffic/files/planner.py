"""Files of applications: validation of uploads, expiry, and OpenAI's format. Pure."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from kernel.decoding import decode_json
from traffic.tenants.planner import ApplicationRefused

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
MAX_NAME_LETTERS = 255
SHORTEST_EXPIRY_S, LONGEST_EXPIRY_S = 3600, 2_592_000
"""OpenAI's limits of `expires_after[seconds]`."""


class FilePurpose(StrEnum):
    """Batches read `batch` and write `batch_output`."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Limits of files, with OpenAI's values where it has any."""

    max_bytes: int = 200 * 1024 * 1024
    kept_s: int = 30 * 86_400
    """OpenAI's default for files of batches."""
    max_files_per_tenant: int = 10_000
    max_bytes_per_tenant: int = 100 * 1024**3
    """OpenAI's 100 GB per organisation."""
    uploads_at_once: int = 8
    """Forms that one web process stores at the same time; the others wait."""
    uploads_at_once_per_tenant: int = 3


@dataclass(frozen=True, slots=True)
class FileFacts:
    id: str
    bytes: int
    filename: str
    purpose: str
    created_at: datetime
    expires_at: datetime | None


def file_json(file: FileFacts) -> dict[str, Any]:
    """Returns OpenAI's object; times are Unix seconds."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at.timestamp()),
        "expires_at": int(file.expires_at.timestamp()) if file.expires_at else None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def checked_purpose(purpose: str | None) -> FilePurpose:
    """Raises ApplicationRefused if applications may not upload for this purpose."""
    if purpose != FilePurpose.BATCH.value:
        actual = f"not {purpose[:40]!r}" if purpose else "and is missing"
        raise ApplicationRefused(400, "invalid_value", f"`purpose` must be batch, {actual}", "purpose")
    return FilePurpose.BATCH


def checked_name(name: str | None) -> str:
    """Returns a file's name without the folders that some clients send. Raises ApplicationRefused if it is invalid or
    does not end in .jsonl."""
    plain = re.split(r"[/\\]", name or "")[-1]
    if not plain.endswith(".jsonl") or not plain.isprintable() or len(plain) > MAX_NAME_LETTERS:
        message = f"the name of a file for batches must end in .jsonl and have at most {MAX_NAME_LETTERS} characters"
        raise ApplicationRefused(400, "invalid_file_format", message, "file")
    return plain


def expiry_of(anchor: str | None, seconds: str | int | None, now: datetime, settings: FileSettings) -> datetime:
    """Returns when a file expires, by `expires_after` or by default. Raises ApplicationRefused if `expires_after` is
    invalid in OpenAI's API."""
    return now + timedelta(seconds=expiry_seconds(anchor, seconds, "expires_after") or settings.kept_s)


def expiry_seconds(anchor: str | None, seconds: str | int | None, name: str) -> int | None:
    """Returns the seconds of an expiry policy, or None without one. Raises ApplicationRefused if the policy is
    invalid."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ApplicationRefused(400, "invalid_value", f"`{name}[anchor]` must be created_at", f"{name}.anchor")
    number = int(seconds) if isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,9}", seconds) else seconds
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if not is_whole or not SHORTEST_EXPIRY_S <= number <= LONGEST_EXPIRY_S:  # type: ignore[operator]
        message = f"`{name}[seconds]` must be a whole number from {SHORTEST_EXPIRY_S} to {LONGEST_EXPIRY_S}"
        raise ApplicationRefused(400, "invalid_value", message, f"{name}.seconds")
    return number  # type: ignore[return-value]


def first_model(content: bytes) -> str:
    """Returns the model of a file's first line, or "" if it names none. Validation of the batch reports errors."""
    try:
        model = decode_json(content.split(b"\n", 1)[0])["body"]["model"]
    except (ValueError, KeyError, TypeError, IndexError):
        return ""
    return model if isinstance(model, str) and len(model) <= 200 and "\0" not in model else ""


def file_not_found(file_id: str) -> ApplicationRefused:
    return ApplicationRefused(404, "file_not_found", f"No such File object: {file_id[:80]}", "id")
