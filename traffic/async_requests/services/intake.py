"""Accepts near-real-time requests, one or a group in one statement. A request is in the database before its response is
sent or its message is done. A repeated idempotency key is the first request."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as django_settings
from django.db import connection

from engine_agent.protocol.request_bodies import BadRequest, check_body
from engine_agent.protocol.request_checks import check_request
from engine_agent.protocol.states import ServingClass
from kernel.array_text import array_text
from kernel.outbound import RefusedUrl, check_url, parse_networks
from traffic.async_requests.models import AsyncRequest, new_callback_secret, new_id
from traffic.async_requests.planner import AsyncSettings, AsyncState, limit_of
from traffic.async_requests.selectors import accepted_since, deployments_of_model, open_requests, serving_region
from traffic.async_requests.services.body_groups import bodies_store
from traffic.batch_sinks.selectors import unknown_sinks
from traffic.tenants.planner import QUOTA_USED_UP, ApplicationRefused, json_object
from traffic.tenants.selectors import Application, callback_refusal

MAX_IDEMPOTENCY_LETTERS = 128
MAX_URL_LETTERS = 500


@dataclass(frozen=True, slots=True)
class AsyncSubmission:
    """A request as sent. All but `path` and `body` comes from headers; None means unstated. `sent_at` is when it was
    sent, if not now; a stated limit counts from then. `results_to` is the ID of the queue that gets the outcome, and
    `origin` is repeated there."""

    path: str
    body: bytes
    region: str = ""
    limit_ms: str | None = None
    callback_url: str | None = None
    sink: str | None = None
    idempotency_key: str | None = None
    sent_at: datetime | None = None
    results_to: int | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)


def async_request_accept(
    *, application: Application, submission: AsyncSubmission, now: datetime, settings: AsyncSettings | None = None
) -> tuple[AsyncRequest, bool]:
    """Accepts a request. Returns it and whether it is new: a repeated idempotency key returns the first request. Raises
    ApplicationRefused if it is not accepted."""
    (accepted,) = async_requests_accept(
        application=application, submissions=(submission,), now=now, settings=settings or AsyncSettings()
    )
    if isinstance(accepted, ApplicationRefused):
        raise accepted
    return accepted.request(), accepted.is_new


@dataclass(frozen=True, slots=True)
class AcceptedId:
    """`columns` are those of a new request; empty if the idempotency key was used before, by this request."""

    id: str
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_new(self) -> bool:
        return bool(self.columns)

    def request(self) -> AsyncRequest:
        """Returns the row, read only if it is not new."""
        if not self.columns:
            return AsyncRequest.objects.get(id=self.id)
        row = AsyncRequest(**{**self.columns, "origin": json.loads(self.columns["origin"])})
        row._state.adding, row._state.db = False, connection.alias
        return row


def async_requests_accept(
    *, application: Application, submissions: Sequence[AsyncSubmission], now: datetime, settings: AsyncSettings
) -> list[AcceptedId | ApplicationRefused]:
    """Accepts a group of requests in three statements, whatever its size. Returns a result for each, in their order. A
    repeated idempotency key returns the first request, also within the group."""
    group = _Group(application, now, settings)
    results: list[AcceptedId | ApplicationRefused | None] = [None] * len(submissions)
    rows: dict[int, dict[str, Any]] = {}
    for number, submission in enumerate(submissions):
        try:
            rows[number] = group.checked(submission)
        except ApplicationRefused as refusal:
            results[number] = refusal
    earlier = _earlier(application, (row["idempotency_key"] for row in rows.values()))
    new: dict[int, dict[str, Any]] = {}
    for number, row in rows.items():
        key = row["idempotency_key"]
        known = earlier.get(key) if key else None
        if known is not None:
            results[number] = _repeated(known, row)
            continue
        try:
            group.take_place()
        except ApplicationRefused as refusal:
            results[number] = refusal
            continue
        new[number] = row
        if key:
            earlier[key] = row["id"], row["digest"]
    bodies = [row["body"] for row in new.values()]
    for row, reference in zip(new.values(), bodies_store(bodies, now=now, settings=settings), strict=True):
        row["body_at"], row["body"] = reference, b"" if reference else row["body"]
    inserted = _insert([*new.values()])
    raced = [row["idempotency_key"] for row in new.values() if row["id"] not in inserted]
    winners = _earlier(application, raced)
    for number, row in new.items():
        is_new = row["id"] in inserted
        results[number] = AcceptedId(row["id"], row) if is_new else _repeated(winners[row["idempotency_key"]], row)
    return [each for each in results if each is not None]


class _Group:
    """What requests of one application share: the regions of its models, and the room that its limits leave."""

    def __init__(self, application: Application, now: datetime, settings: AsyncSettings) -> None:
        self._application, self._now, self._settings = application, now, settings
        self._regions: dict[tuple[str, str], str | ApplicationRefused] = {}
        self._room: tuple[int, int] | None = None
        self._sinks: dict[str, bool] = {}

    def checked(self, submission: AsyncSubmission) -> dict[str, Any]:
        """Returns the columns of a request. Raises ApplicationRefused."""
        application, now = self._application, self._now
        payload = _checked_body(submission.body, self._settings)
        columns = _checked_headers(application, submission, now, self._settings)
        columns["region_id"] = self._region(submission.region, payload["model"])
        _check_members(submission, payload)
        if submission.sink is not None:
            self._check_sink(submission.sink)
        return columns | {
            "id": new_id(),
            "serving_class": _serving_class(application),
            "tenant": application.tenant,
            "key": application.key,
            "max_concurrent": application.max_concurrent,
            "path": submission.path,
            "model": payload["model"],
            "body": canonical_body(payload),
            "digest": hashlib.sha256(submission.path.encode() + b"\0" + submission.body).hexdigest(),
            "state": AsyncState.QUEUED.value,
            "created_at": now,
            "due_at": now,
            "results_to_id": submission.results_to,
            "sink_id": submission.sink,
            "origin": json.dumps(dict(submission.origin)),
        }

    def _check_sink(self, name: str) -> None:
        if name not in self._sinks:
            self._sinks[name] = not unknown_sinks(self._application.tenant, [name])
        if not self._sinks[name]:
            whose = f"tenant {self._application.tenant}" if self._application.tenant else "requests without a key"
            raise ApplicationRefused(400, "bad_header", f"X-Switchyard-Sink: {whose} has no sink {name[:64]!r}")

    def take_place(self) -> None:
        """Counts one new request. Raises ApplicationRefused if the limits leave no room."""
        if self._room is None:
            self._room = _limits_room(self._application, self._now, self._settings)
        open_left, minute_left = self._room
        if open_left <= 0:
            most = self._settings.max_open_per_tenant
            raise ApplicationRefused(429, "too_many_open", f"{most} requests wait already; retry after some have ended")
        if minute_left <= 0:
            limit = self._application.requests_per_min
            raise ApplicationRefused(
                429, "rate_limit_exceeded", f"Rate limit reached on requests: Limit {limit} per minute"
            )
        self._room = open_left - 1, minute_left - 1

    def _region(self, named: str, model: str) -> str:
        known = self._regions.get((named, model))
        if known is None:
            try:
                known = serving_region_check(self._application, named, model)
            except ApplicationRefused as refusal:
                known = refusal
            self._regions[named, model] = known
        if isinstance(known, ApplicationRefused):
            raise known
        return known


_TYPES = {
    "id": "text", "tenant": "text", "key": "text", "region_id": "text", "path": "text", "model": "text",
    "serving_class": "text", "max_concurrent": "int", "body": "bytea", "body_at": "text", "digest": "text",
    "idempotency_key": "text", "callback_url": "text", "callback_secret": "text", "state": "text",
    "due_at": "timestamptz", "deadline_at": "timestamptz", "created_at": "timestamptz", "results_to_id": "bigint",
    "origin": "jsonb", "sink_id": "text",
}  # fmt: skip
_INSERT = f"""
INSERT INTO traffic_asyncrequest ({", ".join(_TYPES)}, attempts, failures, reason, answer_at)
SELECT *, 0, 0, '', '' FROM unnest({", ".join(f"%s::{kind}[]" for kind in _TYPES.values())})
ON CONFLICT (tenant, idempotency_key) WHERE NOT (idempotency_key = '') DO NOTHING RETURNING id
"""  # noqa: S608 - names and types are the constants above


def _insert(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Stores the rows whose idempotency key is free. Returns their IDs."""
    if not rows:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(
            _INSERT, [array_text(kind, [row.get(name, "") for row in rows]) for name, kind in _TYPES.items()]
        )
        return {id for (id,) in cursor.fetchall()}


def _earlier(application: Application, keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns ID and digest of the tenant's requests with these idempotency keys."""
    wanted = [key for key in keys if key]
    if not wanted:
        return {}
    found = AsyncRequest.objects.filter(tenant=application.tenant, idempotency_key__in=wanted)
    return {key: (id, digest) for key, id, digest in found.values_list("idempotency_key", "id", "digest")}


def _repeated(known: tuple[str, str], row: Mapping[str, Any]) -> AcceptedId | ApplicationRefused:
    id, digest = known
    if digest == row["digest"]:
        return AcceptedId(id)
    message = f"the Idempotency-Key {row['idempotency_key']!r} belongs to another request; use a new one"
    return ApplicationRefused(409, "idempotency_conflict", message)


def _limits_room(application: Application, now: datetime, settings: AsyncSettings) -> tuple[int, int]:
    """Returns how many more requests may wait, and may be accepted in this minute. Raises ApplicationRefused if the
    budget is used up."""
    if application.over_quota:
        why = "You exceeded your current quota: the budget of this month is used up"
        raise ApplicationRefused(429, QUOTA_USED_UP, why, kind=QUOTA_USED_UP)
    limit = application.requests_per_min
    minute = limit - accepted_since(application, now, 60.0) if limit else settings.max_open_per_tenant
    return settings.max_open_per_tenant - open_requests(application.tenant), minute


def canonical_body(payload: dict[str, Any]) -> bytes:
    """Returns the validated body, serialised again so that all readers on the way parse it alike. The model comes first
    and in ASCII, for the parser that stops there."""
    return json.dumps({"model": payload["model"], **payload}, separators=(",", ":"), allow_nan=False).encode()


def _checked_body(body: bytes, settings: AsyncSettings) -> dict[str, Any]:
    if len(body) > settings.max_body_bytes:
        raise ApplicationRefused(413, "request_too_large", f"the body is longer than {settings.max_body_bytes} bytes")
    payload = json_object(body)
    model = payload.get("model")
    if not isinstance(model, str) or not model:
        raise ApplicationRefused(400, "missing_required_parameter", "the field `model` must name a model", "model")
    if payload.get("stream"):
        raise ApplicationRefused(
            400, "invalid_value", "a near-real-time request cannot stream; omit `stream`", "stream"
        )
    return payload


def _check_members(submission: AsyncSubmission, payload: dict[str, Any]) -> None:
    try:
        check_request(submission.path, payload)
        check_body(submission.path, submission.body)
    except BadRequest as error:
        code = error.code or "invalid_value"
        raise ApplicationRefused(error.status, code, str(error), error.param) from error


def _checked_headers(
    application: Application, submission: AsyncSubmission, now: datetime, settings: AsyncSettings
) -> dict[str, Any]:
    try:
        limit_s = limit_of(submission.limit_ms, settings)
    except ValueError as error:
        raise ApplicationRefused(400, "bad_header", f"X-Switchyard-Deadline-Ms {error}") from error
    key = submission.idempotency_key or ""
    if len(key) > MAX_IDEMPOTENCY_LETTERS or not key.isprintable():
        raise ApplicationRefused(
            400, "bad_header", f"Idempotency-Key must be 1 to {MAX_IDEMPOTENCY_LETTERS} characters"
        )
    since = min(now, submission.sent_at or now) if submission.limit_ms else now
    columns = {"deadline_at": since + timedelta(seconds=limit_s), "idempotency_key": key}
    return columns | (_checked_callback(application.tenant, submission.callback_url) if submission.callback_url else {})


def _checked_callback(tenant: str, url: str) -> dict[str, str]:
    try:
        if len(url) > MAX_URL_LETTERS:
            raise RefusedUrl(f"must be at most {MAX_URL_LETTERS} characters long")
        check_url(url, parse_networks(django_settings.WEBHOOK_NETWORKS))
        if why := callback_refusal(tenant, url):
            raise RefusedUrl(why)
    except RefusedUrl as refusal:
        raise ApplicationRefused(400, "bad_header", f"X-Switchyard-Callback-Url: {refusal}") from refusal
    return {"callback_url": url, "callback_secret": new_callback_secret()}


def _serving_class(application: Application) -> str:
    classes = list(ServingClass)
    urgency = max(classes.index(ServingClass.NEAR_REALTIME), classes.index(application.serving_class))
    return classes[urgency].value


def serving_region_check(application: Application, named: str, model: str) -> str:
    """Returns the region that serves a model for an application; `named` is the region of its ingress. Raises
    ApplicationRefused if no region serves it, or the key is not valid for it."""
    region = serving_region(named)
    deployments = deployments_of_model(region, model) if region else None
    if region is None or deployments is None:
        raise ApplicationRefused(503, "no_routing_table", "no region serves yet; retry shortly")
    if not deployments:
        raise ApplicationRefused(404, "model_not_found", f"The model `{model[:200]}` does not exist", "model")
    if not application.may_use(deployments):
        raise ApplicationRefused(
            403, "model_not_allowed", f"This API key does not include the model `{model[:200]}`", "model"
        )
    return region
