"""Base classes of all view sets, with the conventions of the API. A view set only declares:

- `lookup_field` and `lookup_value_regex`: the field that paths name; default: a numeric `id`,
- `page_order`: the unique field that orders its list; `ordering_fields`: columns for `?ordering=`,
- `watch_kind`: the name of its recorded changes, for `?since=` (kernel.change_triggers),
- `columns`: columns of `switchyard get` (`controlplane.cli.resources.column_of`); default: its first plain fields,
- `aliases`: short names of the list on the command line,
- `row_key`: the field that names a row, if not `lookup_field`,
- `measured`: fields with measurements, which `If-Match` ignores,
- `shown_once`: actions whose answer has a secret and is not stored for a repetition,
- `needs_if_match`: actions that are refused without `If-Match`."""

import hashlib
import json
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, ClassVar, TypeVar

from django.db import transaction
from django.db.models import Model, QuerySet
from rest_framework import mixins, viewsets
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated
from rest_framework.generics import GenericAPIView
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.views import APIView

from kernel import clock
from kernel.rest import idempotency
from kernel.rest.changes import (
    BEGINNING,
    DEFAULT_WATCH_TIMEOUT_S,
    PreconditionFailed,
    PreconditionRequired,
    changes_since,
    is_revision,
    revision_now,
)
from kernel.rest.serializers import WhySerializer, actor_of, body_of
from kernel.rest.throttling import rate_headers

SHOWN = frozenset({"retrieve", "partial_update", "update"})
"""Actions whose answer is the object itself."""
_HALF = 20
"""Hexadecimal digits: 80 bits, far beyond chance."""


def etag_of(representation: Any, measured: Set[str] = frozenset()) -> str:
    """Returns the quoted tag. `measured`: names of fields with measurements, at any depth."""
    return f'"{_digest(_without(representation, measured))}-{_digest(representation)}"'


def is_named(present: str, header: str) -> bool:
    """`If-None-Match`: whether the header names this representation, by weak comparison (RFC 9110)."""
    return header.strip() == "*" or present in (tag.removeprefix("W/") for tag in _tags(header))


def permits(present: str, header: str) -> bool:
    """`If-Match`: whether a write may proceed. Weak tags never match."""
    return header.strip() == "*" or _state(present) in map(_state, _tags(header))


def _tags(header: str) -> list[str]:
    return [tag.strip() for tag in header.split(",")]


def _state(tag: str) -> str:
    return tag.partition("-")[0]


def _digest(document: Any) -> str:
    return hashlib.sha256(JSONRenderer().render(document)).hexdigest()[:_HALF]


def _without(document: Any, names: Set[str]) -> Any:
    if isinstance(document, dict):
        return {name: _without(value, names) for name, value in document.items() if name not in names}
    return [_without(item, names) for item in document] if isinstance(document, list) else document


Row = TypeVar("Row", bound=Model)
Handler = Callable[..., Response]
Service = Callable[..., object]
Body = type[Serializer[Any]]

UNCHANGED = "Switchyard-Unchanged"
"""In the response of a watch without news: the user's number, the kind, and the seconds that it would wait
(controlplane.api.watch_middleware)."""


class Conventions(APIView):
    """The conventions of every view of the API."""

    action: str
    detail: bool
    measured: ClassVar[Set[str]] = frozenset()
    shown_once: ClassVar[Set[str]] = frozenset()
    needs_if_match: ClassVar[Set[str]] = frozenset()
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        try:
            super().initial(request, *args, **kwargs)
        except (NotAuthenticated, AuthenticationFailed):
            self.check_throttles(request)  # anonymous requests are counted by address
            raise
        method = str(request.method).lower()
        if method in {"post", "put", "patch", "delete"} and hasattr(self, method):
            setattr(self, method, partial(self._guarded, getattr(self, method)))

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        finished = super().finalize_response(request, response, *args, **kwargs)
        for name, value in rate_headers(request).items():
            finished.headers[name] = value
        return self._tagged(request, finished)

    def _guarded(self, handler: Handler, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Run the handler once, if the request's conditions hold."""
        required = self.action in self.needs_if_match
        if not required and "If-Match" not in request.headers and self._key(request) is None:
            return handler(request, *args, **kwargs)
        with transaction.atomic():
            self._check_conditions(request, required)
            if self._key(request) is None:
                return handler(request, *args, **kwargs)
            return self._once(handler, request, *args, **kwargs)

    def _key(self, request: Request) -> str | None:
        return request.headers.get(idempotency.HEADER) if request.method == "POST" else None

    def _once(self, handler: Handler, request: Request, *args: Any, **kwargs: Any) -> Response:
        fingerprint = idempotency.fingerprint_of(
            method=str(request.method),
            path=request.path.rstrip("/"),
            query=request.META.get("QUERY_STRING", ""),
            body=request.data,
        )
        key = idempotency.validated_key(str(self._key(request)))
        idempotent = idempotency.IdempotentRequest(f"user:{request.user.pk}", key, fingerprint)

        def act() -> idempotency.StoredResponse:
            response = handler(request, *args, **kwargs)
            return idempotency.StoredResponse(response.status_code, JSONRenderer().render(response.data))

        secret = self.action in self.shown_once
        answer, done_at = idempotency.respond_once(idempotent, act, secret=secret, now=clock.now())
        headers = {idempotency.REPLAYED: "true"} if done_at else None
        return Response(json.loads(answer.body), status=answer.status, headers=headers)

    def _check_conditions(self, request: Request, required: bool) -> None:
        """Compares `If-Match` with the current object, whose row is locked until the write."""
        given = request.headers.get("If-Match")
        if given is None and required:
            raise PreconditionRequired("this needs If-Match with the ETag of the object that you read, or `*`")
        if given is None or not self.detail or not isinstance(self, GenericAPIView):
            return
        instance = self.get_object()
        if instance.pk is not None:
            type(instance)._base_manager.select_for_update().filter(pk=instance.pk).first()
        present = etag_of(self.get_serializer(self.get_object()).data, self.measured)
        if not permits(present, given):
            raise PreconditionFailed(f"it has changed since; it is {present} now", {"ETag": present})

    def _tagged(self, request: Request, response: Any) -> Any:
        if not (
            self.detail and response.status_code == 200 and self.action in SHOWN and isinstance(response, Response)
        ):
            return response
        tag = etag_of(response.data, self.measured)
        known = request.headers.get("If-None-Match")
        if request.method in {"GET", "HEAD"} and known is not None and is_named(tag, known):
            unchanged = Response(status=304, headers={**rate_headers(request), "ETag": tag})
            return super().finalize_response(request, unchanged)
        response.headers["ETag"] = tag
        return response


class Listed(Conventions):
    """The conventions of every list: a declared order, and changes since a revision."""

    page_order: ClassVar[str] = "pk"
    ordering_fields: ClassVar[Sequence[str]] = ()
    watch_kind: ClassVar[str | None] = None
    columns: ClassVar[str] = ""
    aliases: ClassVar[Sequence[str]] = ()
    row_key: ClassVar[str] = ""

    def watch_key(self, row: Any) -> str:
        """Returns the key of a row in the API."""
        return str(getattr(row, str(getattr(self, "lookup_field", "pk"))))

    def changes(self, request: Request, since: str) -> Response:
        """Answers `?since=`: a list with `gone` and the next `revision`."""
        view: Any = self
        if since == BEGINNING:
            revision = revision_now()
            listed = super().list(request)  # type: ignore[misc] # beside ListModelMixin
            return Response({**listed.data, "gone": [], "revision": revision})
        rows: QuerySet[Any] = view.get_queryset()
        wanted = view.filter_queryset(rows)
        changes = changes_since(str(self.watch_kind), since)
        changed = list(wanted.filter(pk__in=changes.things)) if changes.things else []
        here = {str(row.pk) for row in changed}
        gone = {thing: key for thing, key in changes.things.items() if thing not in here}
        if unnamed := [thing for thing, key in gone.items() if not key]:
            gone |= {str(row.pk): self.watch_key(row) for row in rows.filter(pk__in=unnamed)}
        results = view.get_serializer(changed, many=True).data
        body = {"next": None, "previous": None, "results": results, "gone": sorted(filter(None, gone.values()))}
        waits = f"{request.user.pk} {self.watch_kind} {_patience_s(request)}"
        unchanged = {} if changed or body["gone"] else {UNCHANGED: waits}
        return Response({**body, "revision": changes.revision}, headers=unchanged)

    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        since = request.query_params.get("since", "")
        if self.watch_kind and is_revision(since):
            return self.changes(request, since)
        listed: Response = super().list(request, *args, **kwargs)  # type: ignore[misc] # beside ListModelMixin
        return listed


def _patience_s(request: Request) -> int:
    return int(request.query_params.get("timeout", DEFAULT_WATCH_TIMEOUT_S))


class ViewSet(Conventions, viewsets.ViewSet):
    """Actions without rows."""


class ObjectActions:
    """Actions that are one call of a service with the object's key, the fields of the body, the user and the time."""

    def act_on_object(
        self, request: Request, service: Service, key: str, accepted: Body | None = WhySerializer
    ) -> Response:
        """Calls a service that takes the key as `key`, and returns the object as it is then."""
        view: Any = self
        self._call(service, request, {key: getattr(view.get_object(), view.lookup_field)}, accepted)
        return Response(view.get_serializer(view.get_object()).data)

    def remove_object(self, request: Request, service: Service, key: str, accepted: Body | None = None) -> Response:
        """Calls a service that takes the key as `key`, and returns the object as it was."""
        view: Any = self
        row = view.get_object()
        shown = view.get_serializer(row).data
        self._call(service, request, {key: getattr(row, view.lookup_field)}, accepted)
        return Response(shown)

    def _call(self, service: Service, request: Request, key: dict[str, Any], accepted: Body | None) -> None:
        fields = body_of(request, accepted) if accepted else {}
        service(**key, **fields, actor=actor_of(request), now=clock.now())


class GenericViewSet(ObjectActions, Conventions, viewsets.GenericViewSet[Row]):
    """Rows, with the mixed-in actions."""


class ListModelMixin(Listed, mixins.ListModelMixin):
    """A list with the conventions of lists."""


class ReadOnlyModelViewSet(ObjectActions, Listed, viewsets.ReadOnlyModelViewSet[Row]):
    """A list and single objects, without changes."""
