"""Describes what every operation inherits from kernel.rest.view_sets: headers of requests and responses, their
statuses, and bearer tokens. DRF loads it by its name in the settings, before any view."""

from typing import Any

from drf_spectacular.drainage import warn
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import force_instance

from controlplane.api.examples import STATED
from kernel.rest import idempotency
from kernel.rest.view_sets import SHOWN

JsonObject = dict[str, Any]


LISTING = "x-switchyard-list"
"""Extension of list operations: the columns of `switchyard get` (controlplane/cli/schema.py)."""


def described_header(description: str, kind: str = "string", **more: Any) -> JsonObject:
    return {"description": description, "schema": {"type": kind, **more}}


RATE_HEADERS: JsonObject = {
    "RateLimit-Limit": described_header("Requests per minute; absent if requests are not limited.", "integer"),
    "RateLimit-Remaining": described_header("Requests left in this minute.", "integer"),
    "RateLimit-Reset": described_header("Seconds until the next minute begins.", "integer"),
}
ETAG: JsonObject = {"ETag": described_header("Strong ETag of the object's current state.")}


VERBS = {"retrieve": "Show", "partial_update": "Change", "destroy": "Delete"}
"""Actions of view sets with their own verbs; others are their own verb."""
OPERATIONS = {"create": "create", "partial_update": "change", "destroy": "delete", "load": "retrieve"}
"""Actions whose `operationId` has another verb than their path."""
SUMMARIES: dict[tuple[str, str], str] = {
    ("agent-rollout", "create"): "Upgrade all agents",
    ("apply", "create"): "Apply documents",
    ("apply", "preview"): "Preview what documents would change",
    ("approval", "approve"): "Approve a request",
    ("approval", "list"): "List requests for approval",
    ("approval", "reject"): "Reject a request",
    ("approval", "retrieve"): "Show a request for approval",
    ("approval-rule", "partial_update"): "Require approval of an action",
    ("autoscaling", "list"): "Show whether the autoscaler is paused",
    ("autoscaling", "pause"): "Pause the autoscaler",
    ("autoscaling", "resume"): "Resume the autoscaler",
    ("benchmark", "best"): "Find the best version and instance type",
    ("benchmark", "histograms"): "Show the latency histograms of a benchmark",
    ("capacity-plan", "list"): "Show the newest capacity plan",
    ("cell", "load"): "Show the load of a cell over time",
    ("cell", "logs"): "Show the last log lines of a cell",
    ("cost", "list"): "Report costs by group",
    ("deployment", "load"): "Show the load of a deployment over time",
    ("engine-build-upload", "part"): "Send a part of an engine build",
    ("entry", "adopt"): "Adopt an existing DNS entry",
    ("evacuation", "create"): "Evacuate a region",
    ("draft", "list"): "List your plan drafts",
    ("draft", "retrieve"): "Show a plan draft",
    ("evacuation", "preview"): "Preview an evacuation",
    ("image-move", "back"): "Move machines back to their previous image",
    ("key", "policy"): "Show whether API keys are required",
    ("key", "require"): "Require API keys, or stop requiring them",
    ("matrix", "list"): "List traffic matrices",
    ("matrix", "retrieve"): "Show a traffic matrix",
    ("me", "list"): "Show who you are and what you may do",
    ("model-version", "calibration"): "Show the calibration of a model version",
    ("model-version", "diff"): "Compare two model versions",
    ("model-version", "memory"): "Show the memory of a model version, and proposals",
    ("operations", "list"): "Show what is under way, and what waits for a person",
    ("override", "create"): "Fix the traffic shares of a deployment",
    ("override", "preview"): "Preview fixed traffic shares",
    ("plan", "create"): "Simulate a change of the fleet",
    ("region", "load"): "Show the load of a region over time",
    ("rollout", "create"): "Start a rollout",
    ("rollout", "preview"): "Preview a rollout",
    ("rollout", "skip_bake"): "Skip the bake of a rollout",
    ("shift", "list"): "List changes of traffic shares",
    ("shift", "retrieve"): "Show a change of traffic shares",
    ("tenant-webhook", "rotate"): "Rotate the secret of a tenant webhook",
    ("usage", "list"): "Report usage by group",
    ("usage", "responses"): "Report stored responses by tenant",
}
"""Noun and action -> the summary, for those that the rule below does not fit."""


def operation_summary(noun: str, action: str) -> str:
    """One line for lists of operations, such as `Drain a cell` or `List routing tables`."""
    if stated := SUMMARIES.get((noun, action)):
        return stated
    words = noun.replace("-", " ")
    if action == "list":
        return f"List {_plural(words)}"
    verb = VERBS.get(action, action.replace("_", " ").capitalize())
    return f"{verb} {'an' if words[0] in 'aeiou' and not words.startswith('use') else 'a'} {words}"


def _plural(words: str) -> str:
    if words.endswith("ix"):
        return words[:-2] + "ices"
    if words.endswith("y") and words[-2] not in "aeiou":
        return words[:-1] + "ies"
    return words + ("es" if words.endswith(("s", "ch")) else "s")


def listing_of(view: Any) -> JsonObject:
    """How clients show a list as a table: names, the field that names a row, and the view set's columns."""
    found = view.lookup_field
    key = (getattr(view, "lookup_url_kwarg", None) or "id") if found == "pk" or "__" in found else found
    names = [_plural(view.basename), view.basename, *view.aliases]
    return {"names": names, "key": view.row_key or key, "columns": view.columns}


def stated_examples(serializer: Any) -> JsonObject:
    """Field -> example, from `Meta.examples` of a serializer and its base classes."""
    known = serializer if isinstance(serializer, type) else type(serializer)
    stated: JsonObject = {}
    for base in reversed(known.__mro__):
        stated |= getattr(base.__dict__.get("Meta"), "examples", {})
    return stated


class ConventionsSchema(AutoSchema):
    """Describes what view sets inherit from `kernel.rest.view_sets`."""

    def get_summary(self) -> str:
        """One line for lists of operations. A view may override it with `extend_schema(summary=…)`."""
        view: Any = self.view
        return operation_summary(view.basename, view.action)

    def get_operation_id(self) -> str:
        """The path with the verb of the action: `nodes_cordon`, `quotas_delete`."""
        view: Any = self.view
        if self.method == "GET" and view.action in {"list", "retrieve"}:
            return str(super().get_operation_id())
        words = [word.replace("-", "_") for word in self._tokenize_path()]
        verb = OPERATIONS.get(view.action)
        return "_".join([*words, verb] if verb else words)

    def get_request_serializer(self) -> Any:
        """Returns None, because `extend_schema(request=…)` states each body."""
        return None

    def get_response_serializers(self) -> Any:
        """A change answers 200 with the view set's object."""
        shown = super().get_response_serializers()
        return shown if self.method == "GET" else {200: shown}

    def _map_basic_serializer(self, serializer: Any, direction: str) -> JsonObject:
        schema: JsonObject = super()._map_basic_serializer(serializer, direction)  # type: ignore[no-untyped-call]
        stated = stated_examples(serializer)
        fields = force_instance(serializer).fields  # type: ignore[no-untyped-call]
        if unknown := sorted(stated.keys() - fields.keys()):
            warn(f"Meta.examples of {type(serializer).__name__} has unknown fields: {', '.join(unknown)}")
        if shown := {name: value for name, value in stated.items() if name in schema["properties"]}:
            schema[STATED] = shown
        return schema

    def get_operation(self, *args: Any, **kwargs: Any) -> JsonObject | None:
        operation: JsonObject | None = super().get_operation(*args, **kwargs)
        if operation is None or not hasattr(self.view, "needs_if_match"):
            return operation
        view: Any = self.view
        action, detail = view.action or "", bool(view.detail)
        if action == "list" and "Paginated" in str(operation["responses"]["200"]):
            operation[LISTING] = listing_of(view)
        parameters = operation.setdefault("parameters", [])
        headers = dict(RATE_HEADERS)
        if self.method == "GET" and action == "retrieve":
            parameters.append(
                _header_parameter("If-None-Match", "ETags that you have: 304 if the current one is among them.")
            )
            operation["responses"]["304"] = {
                "description": "Not modified: you have the current state.",
                "headers": {**ETAG, **headers},
            }
        elif detail and self.method != "GET":
            required = action in view.needs_if_match
            parameters.append(
                _header_parameter("If-Match", "The ETag of the object that you read: 412 if it has changed.", required)
            )
        if self.method == "POST":
            description = "Makes retries safe: for 24 hours the same key and request get the first response."
            form = {"type": "string", "minLength": 1, "maxLength": idempotency.LONGEST, "pattern": "^[!-~]+$"}
            parameters.append({**_header_parameter(idempotency.HEADER, description), "schema": form})
            headers[idempotency.REPLAYED] = described_header("`true`: this response was sent before.")
        if action in SHOWN and detail:
            headers |= ETAG
        operation["responses"].get("200", {}).setdefault("headers", {}).update(headers)
        return operation


def _header_parameter(name: str, description: str, required: bool = False) -> JsonObject:
    about = {"required": required, "description": description}
    return {"name": name, "in": "header", **about, "schema": {"type": "string"}}


class BearerTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call] # registers itself
    target_class = "accounts.permissions.BearerTokenAuthentication"
    name = "bearer"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "sw_<prefix>_<secret>",
            "description": "The token in the file `operator-token`, or your personal token.",
        }
