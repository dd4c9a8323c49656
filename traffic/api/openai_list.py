"""Lists as OpenAI's clients page through them: `after` the last id that they saw, until `has_more` is false."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db.models import Q, QuerySet
from django.http import HttpRequest

from traffic.planning.application_refusal import ApplicationRefused

Row = TypeVar("Row", bound=Any)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """How many, which way by creation, and behind which id."""

    limit: int
    descending: bool
    after: str | None


def list_query(request: HttpRequest, *, usual: int, most: int) -> ListQuery:
    """
    Raises:
        ApplicationRefused: a parameter is not as OpenAI has it.
    """
    limit, order = request.GET.get("limit", str(usual)), request.GET.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise ApplicationRefused(400, "invalid_value", f"`limit` must be a whole number from 1 to {most}", "limit")
    if order not in {"asc", "desc"}:
        raise ApplicationRefused(400, "invalid_value", "`order` must be asc or desc", "order")
    return ListQuery(int(limit), order == "desc", request.GET.get("after") or None)


def list_rows(rows: "QuerySet[Row]", query: ListQuery) -> tuple[list[Row], bool]:
    """The page that a query means, of rows with `created_at` and `id`, and whether there is more.

    Raises:
        ApplicationRefused: `after` names none of them.
    """
    if query.after:
        last = rows.filter(id=query.after[:80]).first()
        if last is None:
            raise ApplicationRefused(400, "invalid_value", "`after` must be the id of one of this list", "after")
        way = "lt" if query.descending else "gt"
        same_time = Q(created_at=last.created_at, **{f"id__{way}": last.id})
        rows = rows.filter(Q(**{f"created_at__{way}": last.created_at}) | same_time)
    ordered = rows.order_by("-created_at", "-id") if query.descending else rows.order_by("created_at", "id")
    found = list(ordered[: query.limit + 1])
    return found[: query.limit], len(found) > query.limit


def list_json(rows: Sequence[Row], shown: Callable[[Row], dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [shown(row) for row in rows],
        "first_id": rows[0].id if rows else None,
        "last_id": rows[-1].id if rows else None,
        "has_more": has_more,
    }
