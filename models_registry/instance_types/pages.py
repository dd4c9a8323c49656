"""Pages of instance types: the list with the form of a new one, and one type with its users, changes and deletion.
Services do the changes."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from controlplane.dashboard.actions import (
    WHY,
    Action,
    ActionMenu,
    Field,
    Submission,
    Target,
    action,
    action_menu,
    action_view,
    page_target,
)
from controlplane.dashboard.choices import choose
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from models_registry.instance_types.api import ChangeInstanceTypeSerializer, CreateInstanceTypeSerializer
from models_registry.instance_types.models import InstanceType, Origin
from models_registry.instance_types.planner import CPU_ARCHITECTURES, INSTANCE_TYPES, SHIPPED_ON
from models_registry.instance_types.selectors import type_uses
from models_registry.instance_types.services import instance_type_change, instance_type_create, instance_type_delete

NUMBERS = (
    "chips", "cores", "memory_gib", "tensor_parallel_degree", "vcpus", "host_memory_gib", "price_per_hour", "watts",
)  # fmt: skip
FIELDS = ("accelerator", *NUMBERS, "cpu_arch", "notes")
"""Inputs of the forms; the API accepts the others as well."""


@dataclass(frozen=True, slots=True)
class TypeForm:
    """The form for a new type, and what it suggests."""

    accelerators: tuple[str, ...]
    fields: tuple[Field, ...]
    shipped_on: str = f"{SHIPPED_ON:%Y-%m-%d}"


@dataclass(frozen=True, slots=True)
class TypePage:
    kind: InstanceType
    uses: tuple[str, ...]


def _form(request: PageRequest) -> TypeForm:
    names = InstanceType.objects.order_by("accelerator").values_list("accelerator", flat=True).distinct()
    return TypeForm(tuple(names), _fields(None))


def _listed(request: PageRequest) -> "QuerySet[InstanceType]":
    rows, text, origin = InstanceType.objects.all(), request.text("q"), request.text("origin")
    rows = rows.filter(Q(name__icontains=text) | Q(accelerator__icontains=text)) if text else rows
    return rows.filter(origin=origin) if origin else rows


def _column(name: str, label: str, css: str = "wide number") -> Column[InstanceType]:
    """A number of the type, the largest first at the first click."""
    return Column(name, label, lambda row: getattr(row, name), (name,), css, is_newest_first=True)


TYPE_LIST: List[InstanceType] = List(
    name="instance-types",
    columns=(
        Column("name", "Type", lambda row: row.name, ("name",)),
        Column("accelerator", "Accelerators", lambda row: f"{row.chips} x {row.accelerator}", ("accelerator", "chips")),
        _column("memory_gib", "Memory", "number"),
        _column("cores", "Cores"),
        Column("host", "Host", lambda row: row.vcpus, ("vcpus",), "wide", is_newest_first=True),
        _column("network_gbps", "Network"),
        _column("local_nvme_gb", "NVMe"),
        _column("price_per_hour", "$/h"),
        _column("watts", "Watts"),
        Column("origin", "Origin", lambda row: row.origin, ("origin",), "wide"),
    ),
    query=_listed,
    order=("name",),
    filters=("q", "origin"),
)


def _filter(request: PageRequest) -> Filter:
    origin = choose(request, "origin", "every origin", Origin.values)
    return Filter(
        text_label="Find by name or accelerator", text_name="q", text=request.text("q"), choices=(origin,)
    )  # fmt: skip


def _fields(kind: InstanceType | None) -> tuple[Field, ...]:
    """The inputs of the form: with the values of a type, or empty."""
    return tuple(
        Field(
            name,
            LABELS.get(name, name.replace("_", " ").capitalize()),
            "number" if name in NUMBERS else "text",
            "" if kind is None or getattr(kind, name) is None else str(getattr(kind, name)),
            required=kind is None and name == "accelerator",
            least=0 if name in NUMBERS else None,
            step="any" if name in NUMBERS else "",
        )
        for name in FIELDS
    )


LABELS = {
    "memory_gib": "Memory, GiB",
    "host_memory_gib": "Memory of the host, GiB",
    "vcpus": "vCPUs",
    "price_per_hour": "US dollars an hour",
    "cpu_arch": f"Processor, {' or '.join(CPU_ARCHITECTURES)}",
}


def _find_type(key: str) -> InstanceType:
    return found_or_404(InstanceType.objects.filter(name=key).first(), f"instance type {key!r}")


def _type(request: PageRequest) -> TypePage:
    kind = _find_type(request.key)
    return TypePage(kind, tuple(type_uses(kind.name)))


def _actions(request: PageRequest) -> ActionMenu:
    kind = request.once(_type).kind
    last = ACTIONS["restore" if kind.name in INSTANCE_TYPES else "delete"]
    return action_menu(kind, request.caller.access, ACTIONS["change"], last)


TOPICS = ("instance-types", "deployments", "nodes")
INSTANCE_TYPES_PAGE = Page(
    section="machines",
    title="Instance types",
    fragments=(
        Fragment("instance-types-table", "", TOPICS, "models_registry/instance_types/table.html", TYPE_LIST.page),
        Fragment("instance-types-new", "Add a type", (), "models_registry/instance_types/new.html", _form),
    ),
    narrow=_filter,
    lists=(TYPE_LIST,),
)
INSTANCE_TYPE = Page(
    section="machines",
    title="",
    fragments=(Fragment("instance-type", "", TOPICS, "models_registry/instance_types/instance_type.html", _type),),
    actions=_actions,
)


@action(page_target("instance-types", "instance types"))
def instance_type_new(form: Submission, _: None) -> HttpResponse:
    fields = form.valid(CreateInstanceTypeSerializer, "name", *FIELDS, "why")
    row = instance_type_create(**fields, actor=form.actor, now=form.now)
    return redirect("instance-type", key=row.name)


def _change(form: Submission, kind: InstanceType) -> None:
    fields = form.valid(ChangeInstanceTypeSerializer, *FIELDS, "why")
    instance_type_change(**fields, name=kind.name, actor=form.actor, now=form.now)


def _restore(form: Submission, kind: InstanceType) -> None:
    instance_type_delete(name=kind.name, actor=form.actor, now=form.now, why=form.text("why"))


def _delete(form: Submission, kind: InstanceType) -> HttpResponse:
    _restore(form, kind)
    return redirect("instance-types")


TARGET = Target(
    noun="instance type",
    find=_find_type,
    name=lambda kind: kind.name,
    url=lambda kind: reverse("instance-type", args=(kind.name,)),
    action_url=lambda kind, name: reverse("instance-type-action", args=(kind.name, name)),
)


def _change_effect(kind: InstanceType, now: datetime) -> str:
    in_use = "It is in use, so its hardware cannot change." if type_uses(kind.name) else "Nothing uses it."
    return f"Empty fields stay as they are. {in_use}"


def _why_not_restore(kind: InstanceType) -> str:
    return "It has its shipped values." if kind.origin == Origin.SHIPPED else ""


def _why_not_delete(kind: InstanceType) -> str:
    uses = type_uses(kind.name)
    return f"It is in use by {uses[0]}." if uses else ""


ACTIONS: dict[str, Action[InstanceType]] = {
    each.name: each
    for each in (
        Action(
            target=TARGET,
            name="change",
            label="Change",
            run=_change,
            fields=lambda kind: (*_fields(kind), WHY),
            effect=_change_effect,
        ),
        Action(
            target=TARGET,
            name="restore",
            label="Restore",
            run=_restore,
            fields=(WHY,),
            effect=lambda kind, now: "It gets its shipped values back.",
            why_not=_why_not_restore,
        ),
        Action(
            target=TARGET,
            name="delete",
            label="Delete",
            run=_delete,
            typed=TARGET.name,
            fields=(WHY,),
            effect=lambda kind, now: "The type is deleted.",
            why_not=_why_not_delete,
        ),
    )
}
instance_type_action = action_view(*ACTIONS.values())
