"""Reads JSON bodies, within limits: what is too long or nested too deeply is refused before it costs anything."""

from http import HTTPStatus
from io import BytesIO
from typing import Any

from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import JSONParser

MAX_BODY_BYTES = 256 * 1024
"""Our largest request names every region of a deployment: a few kilobytes."""


class BodyTooLarge(APIException):
    status_code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    default_detail = f"The body may have at most {MAX_BODY_BYTES} bytes."
    default_code = "too_large"


class BoundedJSONParser(JSONParser):
    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """The parsed body.

        Raises:
            BodyTooLarge: longer than `MAX_BODY_BYTES`.
            ParseError: no JSON, or nested deeper than Python's parser goes.
        """
        body = stream.read(MAX_BODY_BYTES + 1)
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge
        try:
            return super().parse(BytesIO(body), media_type, parser_context)
        except RecursionError as error:
            raise ParseError("JSON parse error - nested too deeply") from error
