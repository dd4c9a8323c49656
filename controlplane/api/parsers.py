"""Reads JSON bodies within limits: bodies that are too long, nested too deeply, ambiguous or impossible to store are
rejected before they cost anything."""

from http import HTTPStatus
from typing import Any

from rest_framework.exceptions import APIException, ErrorDetail, ParseError, ValidationError
from rest_framework.parsers import JSONParser

from kernel.decoding import NO_TEXT, UnstorableText, decode_json

MAX_BODY_BYTES = 256 * 1024
"""The largest legitimate request names every region of a deployment: a few kilobytes."""
DEEPEST = 32
"""Nesting of objects and lists; engine options in a document have eight levels."""


class BodyTooLarge(APIException):
    status_code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    default_detail = f"The body may have at most {MAX_BODY_BYTES} bytes."
    default_code = "too_large"


class BoundedJSONParser(JSONParser):
    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """The parsed body. Raises BodyTooLarge if it is longer than `MAX_BODY_BYTES`. Raises ParseError for invalid or
        ambiguous JSON, or if it is nested deeper than `DEEPEST`. Raises ValidationError for texts that the database
        rejects, with their paths."""
        body = stream.read(MAX_BODY_BYTES + 1)
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge
        try:
            return decode_json(body, deepest=DEEPEST)
        except UnstorableText as odd:
            errors = {place.replace("\0", "\ufffd"): [ErrorDetail(NO_TEXT, "storable")] for place in odd.places}
            raise ValidationError(errors) from odd
        except ValueError as error:
            raise ParseError(f"JSON parse error - {error}") from error
