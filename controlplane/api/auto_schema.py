"""Describes every operation's share in what view sets inherit (kernel.rest.view_sets): headers of requests and
responses, the statuses that go with them, and bearer tokens. DRF loads it by its name in the
settings, before any view."""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema

from kernel.rest import idempotency
from kernel.rest.etags import SHOWN

JsonObject = dict[str, Any]


def described_header(description: str, kind: str = "string", **more: Any) -> JsonObject:
    return {"description": description, "schema": {"type": kind, **more}}


RATE_HEADERS: JsonObject = {
    "RateLimit-Limit": described_header(
        "Requests that you may make in a minute; the headers are missing where requests are not counted.", "integer"
    ),
    "RateLimit-Remaining": described_header("Those that are left.", "integer"),
    "RateLimit-Reset": described_header("Seconds until the next minute begins.", "integer"),
}
ETAG: JsonObject = {"ETag": described_header("Of the object as it is now; strong.")}


class ConventionsSchema(AutoSchema):
    """Describes what view sets inherit from `kernel.rest.view_sets`."""

    def get_operation(self, *args: Any, **kwargs: Any) -> JsonObject | None:
        operation: JsonObject | None = super().get_operation(*args, **kwargs)
        if operation is None or not hasattr(self.view, "needs_if_match"):
            return operation
        view: Any = self.view
        action, detail = view.action or "", bool(view.detail)
        parameters = operation.setdefault("parameters", [])
        headers = dict(RATE_HEADERS)
        if self.method == "GET" and action == "retrieve":
            parameters.append(
                _header_parameter("If-None-Match", "ETags that you have: 304 if one of them is the present one.")
            )
            operation["responses"]["304"] = {"description": "You have it already.", "headers": {**ETAG, **headers}}
        elif detail and self.method != "GET":
            required = action in view.needs_if_match
            parameters.append(
                _header_parameter("If-Match", "The ETag of what you looked at: 412 if it is another now.", required)
            )
        if self.method == "POST":
            description = "Makes repeating harmless: for 24 hours the same key and request get the answer of the first."
            form = {"type": "string", "minLength": 1, "maxLength": idempotency.LONGEST, "pattern": "^[!-~]+$"}
            parameters.append({**_header_parameter(idempotency.HEADER, description), "schema": form})
            headers[idempotency.REPLAYED] = described_header("`true`: this answer was given before.")
        if action in SHOWN and detail:
            headers |= ETAG
        operation["responses"].get("200", {}).setdefault("headers", {}).update(headers)
        return operation


def _header_parameter(name: str, description: str, required: bool = False) -> JsonObject:
    about = {"required": required, "description": description}
    return {"name": name, "in": "header", **about, "schema": {"type": "string"}}


class BearerTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call] # registers itself
    target_class = "accounts.authentication.BearerTokenAuthentication"
    name = "bearer"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "sw_<prefix>_<secret>",
            "description": "The token in the file `operator-token`, or one made for you.",
        }
