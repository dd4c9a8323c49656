"""Pages of sinks of batches: the sinks with their deliveries, and the wizards that create and change one. They decide
nothing: services check and apply."""

from typing import Any

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.urls import reverse

from controlplane.api.apply.planning import Kind
from controlplane.dashboard.actions import Action, Submission, Target, action_view
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from controlplane.dashboard.wizards import (
    Documents,
    Input,
    InputKind,
    Option,
    Step,
    Typed,
    Values,
    Wizard,
    document,
    nested,
)
from kernel.access import Role
from traffic.batch_sinks.models import SETTABLE, BatchDelivery, BatchSink
from traffic.batch_sinks.planner import DeliveryState, SinkKind
from traffic.batch_sinks.selectors import sinks_with_waiting_requests
from traffic.batch_sinks.services.sinks import batch_delivery_retry, batch_sink_delete
from traffic.keys.models import ApplicationKey

OFFERED = 200
TOPIC = ("batches",)


def _sinks(request: PageRequest) -> "QuerySet[Any]":
    return sinks_with_waiting_requests()


SINK_LIST: List[Any] = List(
    name="sinks",
    columns=(
        Column("sink", "Sink", lambda row: row.name, ("name",)),
        Column("tenant", "Tenant", lambda row: row.tenant, ("tenant",)),
        Column("kind", "Kind", lambda row: row.kind, ("kind",), choices=tuple(SinkKind)),
        Column("url", "Address", lambda row: row.url, ("url",), "wide"),
        Column("key", "Key", lambda row: row.key_template, ("key_template",), "wide"),
        Column("ttl", "TTL (s)", lambda row: row.ttl_s, ("ttl_s",), "number wide"),
        Column("waiting", "Waiting", lambda row: row.waiting, ("waiting",), "number", "Near-real-time results"),
    ),
    query=_sinks,
    order=("name",),
    find=("name", "tenant", "url"),
)


def _deliveries(request: PageRequest) -> "QuerySet[BatchDelivery]":
    return BatchDelivery.objects.all()


def deliveries_of_batch(request: PageRequest) -> "QuerySet[BatchDelivery]":
    """Those of the batch that the page is about."""
    return BatchDelivery.objects.filter(batch=request.key)


def delivery_list(query: Any, prefix: str) -> List[BatchDelivery]:
    """The list of deliveries on a page."""
    return List(
        name="deliveries",
        prefix=prefix,
        columns=(
            Column("sink", "Sink", lambda row: row.sink_id, ("sink",)),
            Column("batch", "Batch", lambda row: row.what, ("batch",)),
            Column("state", "State", lambda row: row.state, ("state",), choices=tuple(DeliveryState)),
            Column("lines", "Lines", lambda row: row.lines, ("lines",), "number", is_newest_first=True),
            Column("dead", "Dead letters", lambda row: row.dead, ("dead",), "number", is_newest_first=True),
            Column("reason", "Reason", lambda row: row.reason, css="wide"),
        ),
        query=query,
        order=("-id",),
        find=("sink__name", "batch__id"),
    )


DELIVERY_LIST = delivery_list(_deliveries, "deliveries-")
SINKS = Page(
    section="batches",
    title="Sinks",
    fragments=(
        Fragment("sinks", "", TOPIC, "traffic/batch_sinks/table.html", SINK_LIST.page),
        Fragment("deliveries", "Deliveries", TOPIC, "traffic/batch_sinks/deliveries.html", DELIVERY_LIST.page),
    ),
    lists=(SINK_LIST, DELIVERY_LIST),
)


def _find(key: str) -> BatchSink:
    return found_or_404(BatchSink.objects.filter(name=key).first(), f"sink {key!r}")


def _find_delivery(key: int) -> BatchDelivery:
    return found_or_404(BatchDelivery.objects.filter(pk=key).first(), f"delivery {key}")


def _delete(form: Submission, row: BatchSink) -> None:
    batch_sink_delete(name=row.name, actor=form.actor, now=form.now)


def _retry(form: Submission, row: BatchDelivery) -> None:
    batch_delivery_retry(delivery_id=row.pk, actor=form.actor, now=form.now)


DELETE = Action(
    target=Target(
        noun="sink",
        find=_find,
        name=lambda row: row.name,
        url=lambda row: reverse("batch-sinks"),
    ),
    name="delete",
    label="Delete",
    role=Role.ADMIN,
    run=_delete,
    typed=lambda row: row.name,
    effect=lambda row, now: "The sink and the record of its deliveries are deleted. Delivered results stay.",
)
RETRY = Action(
    target=Target(
        noun="delivery",
        find=_find_delivery,
        name=str,
        url=lambda row: reverse("batch-page", args=(row.batch_id,)) if row.batch_id else reverse("batch-sinks"),
    ),
    name="retry",
    label="Continue",
    run=_retry,
    effect=lambda row, now: "Delivery continues with the first line that was not delivered.",
)
sink_delete = action_view(DELETE)
delivery_retry = action_view(RETRY)


def _tenants(typed: Typed) -> list[Option]:
    names = ApplicationKey.objects.order_by("tenant").values_list("tenant", flat=True).distinct()
    return [Option(name) for name in names[:OFFERED]]


def _name_in_url(typed: Typed) -> list[Option]:
    return [Option(typed.text("name"))]


def _documents(values: Values) -> Documents:
    """All fields, so that a field that was emptied is cleared."""
    spec: dict[str, Any] = {"key_template": "", "username": "", "ca_pem": "", "errors": False}
    return [document(Kind.BATCH_SINK, values["name"], spec | nested(values, ("tenant", *SETTABLE)))]


def _start(request: PageRequest) -> dict[str, str | list[str]]:
    row = get_object_or_404(BatchSink, name=request.key)
    texts = {name: str(getattr(row, name)) for name in SETTABLE if name != "errors"}
    return {"name": row.name, "tenant": row.tenant, **texts, **({"errors": "on"} if row.errors else {})}


def _input(name: str, **stated: Any) -> Input:
    return Input(name=name, at=f"BatchSink.{name}", **stated)


def _steps(password: str) -> tuple[Step, ...]:
    return (
        Step(
            "Address",
            (
                _input("kind", required=True, value=SinkKind.VALKEY.value),
                _input("url", label="Address", required=True, placeholder="valkeys://answers.example:6379/0"),
                _input("errors", label="Failed lines"),
            ),
            about="Private addresses need their network in SWITCHYARD_WEBHOOK_NETWORKS, public ones TLS.",
        ),
        Step(
            "Valkey or Redis",
            (
                _input("key_template", label="Key of a line", placeholder="answers:{custom_id}"),
                _input("value", value="body"),
                _input("ttl_s", label="TTL in seconds", value="86400"),
                _input("username", placeholder="default"),
                _input("password", kind=InputKind.SECRET, placeholder=password),
                _input("ca_pem", kind=InputKind.LONG, label="Certificates", placeholder="those of the host"),
            ),
        ),
        Step("S3", (_input("part_mib", label="Size of an object in MiB", value="256"),), folded=True),
    )


def _url(documents: Documents) -> str:
    return f"{reverse('batch-sinks')}#sink-{documents[0]['metadata']['name']}"


SINK_WIZARD = Wizard(
    title="New sink",
    section="batches",
    about="A destination for the results of a tenant's batches and near-real-time requests: objects in S3, or keys of "
    "Valkey or Redis.",
    steps=(
        Step(
            "Sink",
            (
                Input(
                    name="name",
                    at="BatchSink.metadata.name",
                    required=True,
                    placeholder="answers",
                    help="1 to 64 letters, digits, - and _. It never changes.",
                ),
                _input("tenant", required=True, options=_tenants),
            ),
        ),
        *_steps("none"),
    ),
    documents=_documents,
    kinds=frozenset({Kind.BATCH_SINK}),
    creates=frozenset({Kind.BATCH_SINK}),
    url=_url,
    role=Role.ADMIN,
)
SINK_CHANGE_WIZARD = Wizard(
    title="Change a sink",
    section="batches",
    about="Pending deliveries use the new values. Another address or user needs the password again.",
    steps=(
        Step(
            "Sink",
            (
                Input(
                    name="name",
                    at="BatchSink.metadata.name",
                    kind=InputKind.CHOICE,
                    required=True,
                    options=_name_in_url,
                ),
                _input("tenant", required=True, options=_tenants, help="It never changes."),
            ),
        ),
        *_steps("unchanged"),
    ),
    documents=_documents,
    kinds=frozenset({Kind.BATCH_SINK}),
    start=_start,
    url=_url,
    role=Role.ADMIN,
)
