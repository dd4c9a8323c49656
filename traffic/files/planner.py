"""Files of applications: what may be uploaded, how long it is kept, and how OpenAI's Files API shows it. Pure."""

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
"""OpenAI's bounds of `expires_after[seconds]`."""


class FilePurpose(StrEnum):
    """`batch` is what batches read, `batch_output` what they wrote."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Every bound of files. OpenAI's where it has one."""

    max_bytes: int = 200 * 1024 * 1024
    kept_s: int = 30 * 86_400
    """OpenAI's default for files of batches."""
    max_files_per_tenant: int = 10_000
    max_bytes_per_tenant: int = 100 * 1024**3
    """OpenAI's 100 GB of an organisation."""
    uploads_at_once: int = 8
    """Whole forms that one web process stores; the others wait."""
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
    """OpenAI's object; times in whole seconds since 1970."""
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
    """
    Raises:
        ApplicationRefused: it is none that an application may upload for.
    """
    if purpose != FilePurpose.BATCH.value:
        said = f"not {purpose[:40]!r}" if purpose else "and is missing"
        raise ApplicationRefused(400, "invalid_value", f"`purpose` must be batch, {said}", "purpose")
    return FilePurpose.BATCH


def checked_name(name: str | None) -> str:
    """A file's name, without the folders that some clients send.

    Raises:
        ApplicationRefused: it does not end in .jsonl, or is no name.
    """
    plain = re.split(r"[/\\]", name or "")[-1]
    if not plain.endswith(".jsonl") or not plain.isprintable() or len(plain) > MAX_NAME_LETTERS:
        message = f"the name of a file for batches must end in .jsonl and have at most {MAX_NAME_LETTERS} letters"
        raise ApplicationRefused(400, "invalid_file_format", message, "file")
    return plain


def expiry_of(anchor: str | None, seconds: str | int | None, now: datetime, settings: FileSettings) -> datetime:
    """When a file is forgotten, by `expires_after` or by default.

    Raises:
        ApplicationRefused: `expires_after` is not as OpenAI has it.
    """
    return now + timedelta(seconds=expiry_seconds(anchor, seconds, "expires_after") or settings.kept_s)


def expiry_seconds(anchor: str | None, seconds: str | int | None, name: str) -> int | None:
    """Seconds of an expiry policy; None where there is none.

    Raises:
        ApplicationRefused: as above.
    """
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
    """The model that a file's first line names; empty where it names none. What is wrong with it is said later."""
    try:
        model = decode_json(content.split(b"\n", 1)[0])["body"]["model"]
    except (ValueError, KeyError, TypeError, IndexError):
        return ""
    return model if isinstance(model, str) and len(model) <= 200 and "\0" not in model else ""


def file_not_found(file_id: str) -> ApplicationRefused:
    return ApplicationRefused(404, "file_not_found", f"No such File object: {file_id[:80]}", "id")
