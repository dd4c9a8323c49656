"""Where HTTP requests enter web: texts that no column takes come no further, and every refusal that no view makes is in
its route's dialect. The REST API answers problem documents, `/v1/` OpenAI's errors, `/agents/` `{"error": ...}`, and
everything else HTML. JSON is decoded by `kernel.decoding`, where a view reads it."""

import codecs
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.core.handlers.asgi import ASGIRequest
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.http.multipartparser import MultiPartParserError
from django.shortcuts import render
from django.utils.encoding import escape_uri_path
from django.views import defaults

from controlplane.api.problems import API_ROOT, CONTENT_TYPE, FAULT, problem_document
from kernel.decoding import NO_TEXT, is_storable
from traffic.tenants.api import openai_error

APPLICATIONS_ROOT, AGENTS_ROOT = "/v1/", "/agents/"
DIALECTS = (API_ROOT, APPLICATIONS_ROOT, AGENTS_ROOT)
"""Of programs; every other path is a page."""
FORMS = frozenset({"application/x-www-form-urlencoded", "multipart/form-data"})
ENCODINGS = frozenset({"utf-8", "ascii"})
NOTHING = "there is nothing here"


class TextRequest(ASGIRequest):
    """A request whose charset may be any text; `TextMiddleware` refuses the odd ones."""

    def _set_content_type_params(self, meta: Any) -> None:
        with suppress(ValueError):  # NUL in the name of the charset, as `charset*=utf-8''%00`
            super()._set_content_type_params(meta)  # type: ignore[misc]  # the stubs lack it


class TextMiddleware:
    """Refuses paths, queries and forms that hold texts which no column takes, and drops such cookies."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if not is_storable(request.path_info):
            return answer_not_found(request, Http404())
        if not _is_utf8(request):
            return refusal(request, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the body in utf-8, the only charset here")
        for name in [name for name, text in request.COOKIES.items() if not is_storable(name + text)]:
            del request.COOKIES[name]
        return _refused(request, "query", lambda: request.GET) or self.get_response(request)

    def process_view(
        self, request: HttpRequest, view: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponse | None:
        """Checks forms of pages. The API takes JSON only, and the view of uploads reads its form in pieces."""
        if request.content_type in FORMS and not request.path.startswith(DIALECTS):
            return _refused(request, "form", lambda: request.POST)
        return None


def _is_utf8(request: HttpRequest) -> bool:
    charset = (request.content_params or {}).get("charset", "utf-8")
    try:
        return codecs.lookup(charset).name in ENCODINGS
    except (LookupError, ValueError):  # ValueError: a name with NUL
        return False


def _refused(request: HttpRequest, what: str, read: Callable[[], QueryDict]) -> HttpResponse | None:
    try:
        fields = read()
    except (SuspiciousOperation, MultiPartParserError) as error:
        return refusal(request, HTTPStatus.BAD_REQUEST, f"the {what} cannot be read: {error}")
    for name, values in fields.lists():
        if not all(is_storable(text) for text in (name, *values)):
            shown = name[:80].replace("\0", "\ufffd")
            return refusal(request, HTTPStatus.BAD_REQUEST, f"{shown!r} of the {what} {NO_TEXT}", shown)
    return None


def refusal(request: HttpRequest, status: HTTPStatus, message: str, field: str = "") -> HttpResponse:
    """An error in the dialect of the request's route. `field`: the parameter that it is about."""
    if request.path.startswith(API_ROOT):
        document = problem_document(status, message, escape_uri_path(request.path))
        if status is HTTPStatus.BAD_REQUEST:
            document["errors"] = [{"field": field, "rule": "storable" if field else "readable", "message": message}]
        return JsonResponse(document, status=status, content_type=CONTENT_TYPE)
    if request.path.startswith(APPLICATIONS_ROOT):
        return openai_error(status, None, message, field or None)
    if request.path.startswith(AGENTS_ROOT):
        return JsonResponse({"error": message}, status=status)
    return render(request, "400.html", {"message": message}, status=status)


def answer_bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's `handler400`."""
    return refusal(request, HTTPStatus.BAD_REQUEST, "the request cannot be read")


def answer_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's `handler404`."""
    if request.path.startswith(DIALECTS):
        return refusal(request, HTTPStatus.NOT_FOUND, NOTHING)
    return defaults.page_not_found(request, exception)


def answer_fault(request: HttpRequest) -> HttpResponse:
    """Django's `handler500`."""
    if request.path.startswith(DIALECTS):
        return refusal(request, HTTPStatus.INTERNAL_SERVER_ERROR, FAULT)
    return defaults.server_error(request)
