"""Turns every error of the API into RFC 9457 problem+json: the error, its path, and the broken rule."""

import logging
import math
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.core.signals import got_request_exception
from django.http import Http404
from django.utils.encoding import escape_uri_path
from rest_framework import exceptions
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from kernel.refusals import Busy, Conflict, InvalidInput, ShareUsedUp

CONTENT_TYPE = "application/problem+json"
API_ROOT = "/api/"
FAULT = "Internal server error; see the server's log."

log = logging.getLogger(__name__)


class StateConflict(exceptions.APIException):
    status_code = HTTPStatus.CONFLICT
    default_code = "conflict"


class NoRoom(exceptions.APIException):
    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    default_code = "busy"

    def __init__(self, refusal: Busy) -> None:
        super().__init__(str(refusal))
        self.wait = refusal.retry_after_s
        if isinstance(refusal, ShareUsedUp):
            self.status_code = HTTPStatus.TOO_MANY_REQUESTS


class ServerFault(exceptions.APIException):
    status_code = HTTPStatus.INTERNAL_SERVER_ERROR
    default_detail = FAULT
    default_code = "fault"


def answer_problem(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's `EXCEPTION_HANDLER`: turns any exception of a view into a problem document."""
    request: Request = context["request"]
    failure = _as_api_exception(error, context)
    if isinstance(failure, ServerFault):
        log.error("%s %s failed", request.method, request.path, exc_info=error)
        got_request_exception.send(sender=None, request=request._request)
    headers = dict(getattr(failure, "headers", {}))
    if auth_header := getattr(failure, "auth_header", None):
        headers["WWW-Authenticate"] = auth_header
    if (wait_s := getattr(failure, "wait", None)) is not None:
        headers["Retry-After"] = str(math.ceil(wait_s))
    # Problems are JSON, whatever format was negotiated (HTML, YAML).
    request.accepted_renderer, request.accepted_media_type = JSONRenderer(), JSONRenderer.media_type
    document = _document(failure, escape_uri_path(request.path))
    return Response(document, status=failure.status_code, headers=headers, content_type=CONTENT_TYPE)


def _as_api_exception(error: Exception, context: dict[str, Any]) -> exceptions.APIException:
    match error:
        case exceptions.APIException():
            return error
        case InvalidInput():
            return exceptions.ValidationError({error.field: [exceptions.ErrorDetail(str(error), error.rule)]})
        case Conflict():
            return StateConflict(str(error))
        case Busy():
            return NoRoom(error)
        case Http404():
            return exceptions.NotFound(_what_is_missing(context))
        case PermissionDenied():
            return exceptions.PermissionDenied(str(error) or None)
        case _:
            return ServerFault()


def _what_is_missing(context: dict[str, Any]) -> str:
    noun = getattr(context["view"], "basename", None)
    names = list(context["kwargs"].values())
    return f"there is no {noun} {names[0]!r}" if noun and names else "there is nothing here"


def problem_document(status: int, detail: str, path: str) -> dict[str, Any]:
    """A problem without errors of single fields."""
    phrase = HTTPStatus(status).phrase
    return {"type": "about:blank", "title": phrase, "status": int(status), "detail": detail, "instance": path}


def _document(failure: exceptions.APIException, path: str) -> dict[str, Any]:
    document = problem_document(failure.status_code, "", path)
    if isinstance(failure, exceptions.ValidationError):
        errors = _errors(failure.detail, "")
        fields = ", ".join(dict.fromkeys(error["field"] or "the request" for error in errors))
        return document | {"detail": f"Not accepted: {fields}.", "errors": errors}
    if isinstance(failure, exceptions.ParseError):
        return document | {"detail": str(failure.detail), "errors": _errors([failure.detail], "")}
    return document | {"detail": str(failure.detail)}


def _errors(detail: Any, field: str) -> list[dict[str, str]]:
    """Nested details -> one entry each, with the dotted path of the field ("" for the whole body)."""
    if isinstance(detail, dict):
        below = [(_path(field, name), part) for name, part in detail.items()]
        return [error for name, part in below for error in _errors(part, name)]
    if isinstance(detail, list):
        whole = all(isinstance(part, str) for part in detail)
        below = [(field if whole else _path(field, index), part) for index, part in enumerate(detail)]
        return [error for name, part in below for error in _errors(part, name)]
    return [{"field": field, "rule": getattr(detail, "code", "invalid"), "message": str(detail)}]


def _path(field: str, name: str | int) -> str:
    if name == "non_field_errors":
        return field
    return f"{field}.{name}" if field else str(name)
