"""Files for hosts in chunks, of which one web process sends a few at a time, and the token that a host shows."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse

from fleet.releases.services.archive import (
    AgentArchive,
    CarriedPython,
)

CHUNK_BYTES = 256 * 1024
DOWNLOADS_AT_ONCE = 16
"""Of one web process: 4 MiB of chunks. Further downloads get 429."""

_downloading = threading.BoundedSemaphore(DOWNLOADS_AT_ONCE)


def bearer_token(request: HttpRequest) -> str:
    return request.headers.get("Authorization", "").partition(" ")[2].strip()


class _Download:
    """A file in chunks, read by threads. Its slot is released when the response is closed or garbage-collected:
    Django drops a response without closing it if the host disconnected while the view ran, or if the file became
    unreadable."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._is_open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await asyncio.to_thread(self._file.read, CHUNK_BYTES):
            yield chunk

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._file.close()
            _downloading.release()

    def __del__(self) -> None:
        self.close()


def download_response(archive: AgentArchive | CarriedPython) -> HttpResponseBase:
    return download_file(archive.path, 0, "application/gzip", {"X-Content-SHA256": archive.digest})


def download_file(path: Path, first: int, kind: str, headers: dict[str, str]) -> HttpResponseBase:
    """The file from this byte on."""
    file = path.open("rb")
    return stream_file(file, os.fstat(file.fileno()).st_size, first, kind, headers)


def stream_file(file: IO[bytes], length: int, first: int, kind: str, headers: dict[str, str]) -> HttpResponseBase:
    if first and first >= length:
        file.close()
        return HttpResponse(status=416, headers={"Content-Range": f"bytes */{length}"})
    if not _downloading.acquire(blocking=False):
        file.close()
        answer = {"error": "too many downloads; try again"}
        return JsonResponse(answer, status=503, headers={"Retry-After": "5"})
    if first:
        file.seek(first)
    stated = {"Content-Length": str(length - first), **headers}
    stated |= {"Content-Range": f"bytes {first}-{length - 1}/{length}"} if first else {}
    return StreamingHttpResponse(_Download(file), content_type=kind, headers=stated, status=206 if first else 200)
