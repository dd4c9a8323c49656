"""Reads JSON bodies, within limits: what is too long, nested too deeply, ambiguous or could never be stored is refused
before it costs anything."""

from http import HTTPStatus
from typing import Any

from rest_framework.exceptions import APIException, ErrorDetail, ParseError, ValidationError
from rest_framework.parsers import JSONParser

from kernel.decoding import NO_TEXT, UnstorableText, decode_json

MAX_BODY_BYTES = 256 * 1024
"""Our largest request names every region of a deployment: a few kilobytes."""
DEEPEST = 32
"""Of objects and lists within each other: an engine's options in a document have eight."""


class BodyTooLarge(APIException):
    status_code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    default_detail = f"The body may have at most {MAX_BODY_BYTES} bytes."
    default_code = "too_large"


class BoundedJSONParser(JSONParser):
    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """The parsed body.

        Raises:
            BodyTooLarge: longer than `MAX_BODY_BYTES`.
            ParseError: no JSON with one meaning, or nested deeper than `DEEPEST`.
            ValidationError: a text in it that no column takes; it names the places.
        """
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
