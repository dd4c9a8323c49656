"""OpenAI's Files API under `/v1/files` for applications. Uploads are streamed from the form's parser to the file store
and downloads from it, so no file is in memory as a whole. The tenant's limits on size and rate are checked before
Django spools the form (`controlplane.request_bodies`)."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import SuspiciousOperation
from django.core.files.uploadhandler import FileUploadHandler, StopUpload
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.http.multipartparser import MultiPartParserError
from django.urls import path

from kernel import clock
from traffic.batches.models import StoredFile
from traffic.batches.selectors import file_facts, stored_file_of, stored_files
from traffic.files.planner import (
    FilePurpose,
    FileSettings,
    checked_name,
    checked_purpose,
    expiry_of,
    file_json,
    file_not_found,
)
from traffic.files.services.files import Upload, file_settings, stored_file_delete, stored_name
from traffic.files.services.store import READ_BYTES, NoSuchFile, StoreAway, file_store
from traffic.tenants.api import application_view, list_json, list_query, list_rows, unknown_path
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

FILES_PATH = "/v1/files"
APPLICATIONS = "applications keep and delete their own files; they change nothing that operators run"


@contextmanager
def away_refused() -> Iterator[None]:
    """Refuses the request with 503 if the store is away."""
    try:
        yield
    except StoreAway as away:
        raise ApplicationRefused(503, "store_away", str(away)) from away


@application_view("GET", "POST", audit_exempt_as=APPLICATIONS)
@away_refused()
def files(request: HttpRequest, application: Application) -> HttpResponseBase:
    """GET: the tenant's files. POST: upload one."""
    if request.method == "POST":
        return JsonResponse(_file_json(_store_upload(request, application)))
    query = list_query(request, usual=10_000, most=10_000)
    purpose = request.GET.get("purpose")
    if purpose not in {None, *FilePurpose}:
        message = f"`purpose` must be one of {', '.join(FilePurpose)}"
        raise ApplicationRefused(400, "invalid_value", message, "purpose")
    rows, has_more = list_rows(stored_files(application.tenant, clock.now(), purpose), query)
    return JsonResponse(list_json(rows, _file_json, has_more=has_more))


@application_view("GET", "DELETE", audit_exempt_as=APPLICATIONS)
@away_refused()
def detail(request: HttpRequest, application: Application, file_id: str) -> HttpResponseBase:
    """GET: metadata of a file. DELETE: delete it."""
    if request.method == "DELETE":
        gone = stored_file_delete(application=application, file_id=file_id, now=clock.now())
        return JsonResponse({"id": gone.id, "object": "file", "deleted": True})
    return JsonResponse(_file_json(_tenant_file(application, file_id)))


@application_view("GET", audit_exempt_as=APPLICATIONS)
@away_refused()
def content(request: HttpRequest, application: Application, file_id: str) -> HttpResponseBase:
    """GET: the bytes of a file."""
    try:
        return file_download(_tenant_file(application, file_id), "attachment")
    except NoSuchFile:  # deleted meanwhile
        raise file_not_found(file_id) from None


def file_download(file: StoredFile, disposition: str) -> StreamingHttpResponse:
    """Streams a file from the store. Raises NoSuchFile if it was deleted, and StoreAway if the store is unavailable."""
    opened = file_store().open(stored_name(file.id))
    headers = {"Content-Length": str(file.bytes), "Content-Disposition": disposition}
    return StreamingHttpResponse(_file_pieces(opened), content_type="application/octet-stream", headers=headers)


class StoreHandler(FileUploadHandler):
    """Streams the form's only file into the store."""

    def __init__(self, settings: FileSettings) -> None:
        super().__init__()
        self._settings = settings
        self.upload: Upload | None = None
        self.name = ""
        self.refusal: ApplicationRefused | StoreAway | None = None

    def new_file(self, field_name: str, file_name: str, *arguments: Any, **named: Any) -> None:
        super().new_file(field_name, file_name, *arguments, **named)
        try:
            if field_name != "file" or self.upload is not None:
                message = f"the form must have one file, in the field `file`, not in {field_name[:40]!r}"
                raise ApplicationRefused(400, "invalid_form", message, "file")
            self.name = checked_name(file_name)
            self.upload = Upload(self._settings)
        except (ApplicationRefused, StoreAway) as refusal:
            self._stop_upload(refusal)

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        try:
            if self.upload is not None:
                self.upload.write(raw_data)
        except (ApplicationRefused, StoreAway) as refusal:
            self._stop_upload(refusal)

    def file_complete(self, file_size: int) -> None:
        return None

    def upload_interrupted(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self.upload is not None:
            self.upload.abort()

    def _stop_upload(self, refusal: ApplicationRefused | StoreAway) -> None:
        self.refusal = refusal
        raise StopUpload(connection_reset=True)


def _store_upload(request: HttpRequest, application: Application) -> StoredFile:
    if request.content_type != "multipart/form-data":
        message = "send the file as a form, `multipart/form-data`, with `purpose` and `file`"
        raise ApplicationRefused(415, "unsupported_media_type", message)
    settings = file_settings()
    handler = StoreHandler(settings)
    request.upload_handlers = [handler]
    try:
        try:
            form = request.POST
        except (MultiPartParserError, SuspiciousOperation) as error:
            raise ApplicationRefused(400, "invalid_form", f"the form cannot be read: {error}"[:300]) from error
        if handler.refusal is not None:
            raise handler.refusal
        if handler.upload is None:
            raise ApplicationRefused(400, "missing_required_parameter", "the form must have a file in `file`", "file")
        now = clock.now()
        purpose = checked_purpose(form.get("purpose"))
        anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
        expires_at = expiry_of(anchor, seconds, now, settings)
        return handler.upload.finish(
            application=application, filename=handler.name, purpose=purpose, expires_at=expires_at, now=now
        )
    finally:
        handler.abort()


def _tenant_file(application: Application, file_id: str) -> StoredFile:
    file = stored_file_of(application.tenant, file_id, clock.now())
    if file is None:
        raise file_not_found(file_id)
    return file


def _file_json(file: StoredFile) -> dict[str, Any]:
    return file_json(file_facts(file))


async def _file_pieces(opened: Any) -> AsyncIterator[bytes]:
    try:
        while piece := await sync_to_async(opened.read, thread_sensitive=False)(READ_BYTES):
            yield piece
    finally:
        opened.close()


urlpatterns = [
    path("<str:file_id>", detail, name="file"),
    path("<str:file_id>/content", content, name="file-content"),
    path(
        "<path:rest>",
        unknown_path("/v1/files, /v1/files/ID and /v1/files/ID/content", audit_exempt_as=APPLICATIONS),
        name="file-unknown-path",
    ),
]
