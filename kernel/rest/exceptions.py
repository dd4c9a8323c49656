"""Why the conventions of the API refuse a request. Each is an error with its own HTTP status."""

from collections.abc import Mapping
from http import HTTPStatus

from rest_framework.exceptions import APIException


class Refused(APIException):
    """`headers` go with the response."""

    def __init__(self, detail: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.headers = dict(headers or {})


class PreconditionFailed(Refused):
    status_code = HTTPStatus.PRECONDITION_FAILED
    default_code = "if_match"


class PreconditionRequired(Refused):
    status_code = HTTPStatus.PRECONDITION_REQUIRED
    default_code = "if_match_required"


class KeyUsedOtherwise(Refused):
    status_code = HTTPStatus.UNPROCESSABLE_ENTITY
    default_code = "idempotency_key"


class InProgress(Refused):
    status_code = HTTPStatus.CONFLICT
    default_code = "in_progress"


class RevisionGone(Refused):
    status_code = HTTPStatus.GONE
    default_code = "revision"
