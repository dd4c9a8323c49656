"""The nouns of the API: their names, where they are, what they are known by, and which columns a list shows. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Row = Mapping[str, Any]
Cell = str
Show = Callable[[Row, datetime], Cell]


@dataclass(frozen=True, slots=True)
class Column:
    """`right`: numbers. `toned`: it takes the colour of the row's tone."""

    title: str
    show: Show
    right: bool = False
    toned: bool = False


@dataclass(frozen=True, slots=True)
class Resource:
    """`name`: as one asks for it; `path`: below /api/v1/; `key`: the field that names one."""

    name: str
    path: str
    key: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]
    ends: bool = False
    """Whether ended ones are left out unless `include=all` asks for them."""


def at(path: str) -> Show:
    """Shows the value at a dotted path; empty where there is none."""

    def show(row: Row, now: datetime) -> Cell:
        value: Any = row
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return text_of(value)

    return show


def age(path: str) -> Show:
    """Shows how long ago the moment at a field was."""

    def show(row: Row, now: datetime) -> Cell:
        return age_text(row.get(path), now)

    return show


def text_of(value: Any) -> Cell:
    """A value in a cell: one line, without quotes."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_inner(part)}" for key, part in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_inner(part) for part in value) or "-"
    return str(value)


def _inner(value: Any) -> Cell:
    """A value within another: what has parts is in braces."""
    text = text_of(value)
    return f"{{{text}}}" if isinstance(value, Mapping | list | tuple) and value else text


def age_text(moment: Any, now: datetime) -> Cell:
    """`42s`, `17m`, `5h`, `3d` since an RFC 3339 moment."""
    if not isinstance(moment, str):
        return "-"
    try:
        seconds = int((now - datetime.fromisoformat(moment)).total_seconds())
    except (ValueError, TypeError):
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(0, seconds)}s"


def _places(row: Row, now: datetime) -> Cell:
    return ", ".join(f"{place['region']} {place['ready']}/{place['cells']}" for place in row.get("regions", ()))


def _counts(field: str) -> Show:
    def show(row: Row, now: datetime) -> Cell:
        return ", ".join(f"{count} {state}" for state, count in row.get(field, {}).items() if count) or "-"

    return show


def _members(row: Row, now: datetime) -> Cell:
    return ", ".join(str(node["id"]) for node in row.get("nodes", ())) or "-"


def _of(*columns: tuple[str, str] | Column) -> tuple[Column, ...]:
    return tuple(one if isinstance(one, Column) else Column(one[0], at(one[1])) for one in columns)


def number(title: str, path: str) -> Column:
    return Column(title, at(path), right=True)


STATE = Column("STATE", at("state"), toned=True)
SINCE = Column("SINCE", age("state_since"), right=True)
AGE = Column("AGE", age("created_at"), right=True)

RESOURCES: tuple[Resource, ...] = (
    Resource(
        "regions", "regions", "name", ("region", "rg"),
        _of(("NAME", "name"), ("PROVIDER", "provider"), Column("NODES", _counts("nodes")),
            Column("CELLS", _counts("cells")), ("INGRESS", "ingress_url")),
    ),
    Resource(
        "capacity-pools", "capacity-pools", "id", ("capacity-pool", "pools"),
        _of(number("ID", "id"), ("REGION", "region"), ("TYPE", "instance_type"), number("PLACE", "position"),
            ("MARKET", "market"), ("ZONE", "zone"), STATE, number("$/H", "price_per_hour"),
            number("FREE", "free"), ("RESERVATION", "reservation"),
            Column("FROM", lambda row, now: str(row.get("declared_by") or "stack")), ("RESTS UNTIL", "paused_until")),
    ),
    Resource(
        "image-moves", "image-moves", "id", ("image-move", "images"),
        _of(number("ID", "id"), ("REGION", "region"), ("TYPE", "instance_type"), ("IMAGE", "image"), STATE,
            ("REASON", "reason"), ("BY", "asked_by"), Column("ASKED", age("asked_at"), right=True)),
    ),
    Resource(
        "instance-types", "instance-types", "name", ("instance-type", "it"),
        _of(("NAME", "name"), ("ACCELERATOR", "accelerator"), number("CHIPS", "chips"), number("CORES", "cores"),
            number("GIB", "memory_gib"), number("$/H", "price_per_hour"), number("TP", "tensor_parallel_degree")),
    ),
    Resource(
        "nodes", "nodes", "id", ("node", "no"),
        _of(("NODE", "id"), STATE, ("REGION", "region"), ("TYPE", "instance_type"), ("ROLE", "role"),
            ("CELL", "cell"), ("CORDONED", "cordoned"), ("CONNECTED", "connected"), SINCE),
        ends=True,
    ),
    Resource(
        "machines", "machines", "id", ("machine", "ma"),
        _of(("MACHINE", "id"), STATE, ("PROVIDER", "provider"), ("REGION", "region"), ("NODE", "node"),
            ("ADDRESS", "address"), ("TYPE", "instance_type"), ("AGENT", "agent_version"), SINCE,
            ("NOTICES", "notices")),
        ends=True,
    ),
    Resource(
        "invitations", "machines/invitations", "prefix", ("invitation", "invites"),
        _of(("PREFIX", "prefix"), ("STATE", "state"), ("REGION", "region"), ("ROLE", "role"), number("LEFT", "left"),
            ("EXPIRES", "expires_at"), ("BY", "created_by")),
    ),
    Resource(
        "agent-releases", "agents/releases", "id", ("agent-release",),
        _of(("RELEASE", "id"), ("VERSION", "version"), number("PROTOCOL", "protocol"), ("CURRENT", "is_current"),
            Column("RUN BY", lambda row, now: str(len(row.get("agents", ()))), right=True), ("AGENTS", "agents"), AGE),
    ),
    Resource(
        "agent-rollouts", "agents/rollouts", "id", ("agent-rollout",),
        _of(("ID", "id"), STATE, ("FROM", "from_release"), ("TO", "to_release"), number("RING", "ring"),
            ("BY", "actor"), ("REASON", "reason"), AGE),
    ),
    Resource(
        "cells", "cells", "id", ("cell", "c"),
        _of(("CELL", "id"), STATE, ("VERSION", "model_version"), ("REGION", "region"), Column("NODES", _members),
            number("BUSY", "load.in_flight"), number("QUEUED", "load.queued"), number("TOK/S", "load.tokens_per_s"),
            SINCE),
        ends=True,
    ),
    Resource(
        "deployments", "deployments", "name", ("deployment", "deploy", "dep"),
        _of(("NAME", "name"), ("VERSION", "model_version"), ("CLASS", "serving_class"), ("TYPES", "instance_types"),
            Column("READY", _places), AGE),
    ),
    Resource(
        "quotas", "quotas", "name", ("quota",),
        _of(("TEAM", "team"), ("TYPE", "instance_type"), ("REGION", "region"), number("MACHINES", "machines"),
            number("USED", "used"), number("BORROWED", "borrowed"), number("IDLE", "idle"), number("WANTED", "wanted"),
            ("DEPLOYMENTS", "deployments")),
    ),
    Resource(
        "forecasts", "forecasts", "id", ("forecast",),
        _of(("DEPLOYMENT", "deployment"), ("ORIGIN", "origin"), ("CLASS", "serving_class"),
            Column("MADE", age("made_at"), right=True), ("JUDGED", "is_judged"), ("PROBLEM", "problem")),
    ),
    Resource(
        "scaling-places", "autoscaling/places", "id", ("scaling-place", "scaling"),
        _of(("DEPLOYMENT", "deployment"), ("REGION", "region"), ("MODE", "mode"),
            Column("RANGE", lambda row, now: f"{row['min']}-{row['max']}"), number("CELLS", "cells"),
            number("WANTED", "wanted"), ("RULE", "rule"), ("REASON", "reason")),
    ),
    Resource(
        "scaling-decisions", "autoscaling/decisions", "id", ("scaling-decision",),
        _of(Column("AGO", age("at"), right=True), ("DEPLOYMENT", "deployment"), ("REGION", "region"),
            number("WAS", "was"), number("WANTED", "wanted"), ("ACTED", "acted"), ("RULE", "rule"),
            number("TOO FEW", "too_few_cell_s"), number("TOO MANY", "too_many_cell_s"), ("REASON", "reason")),
    ),
    Resource(
        "rollouts", "rollouts", "id", ("rollout", "ro"),
        _of(number("ID", "id"), ("DEPLOYMENT", "deployment"), STATE, ("FROM", "from_version"), ("TO", "to_version"),
            ("STAGE", "stage_label"), SINCE, ("REASON", "reason")),
    ),
    Resource(
        "incidents", "incidents", "id", ("incident", "inc"),
        _of(number("ID", "id"), STATE, ("KIND", "kind"), ("SUBJECT", "subject"),
            Column("OPENED", age("opened_at"), right=True), ("SUMMARY", "summary")),
    ),
    Resource(
        "models", "models", "name", ("model",),
        _of(("NAME", "name"), ("VERSIONS", "versions"), ("DESCRIPTION", "description"), AGE),
    ),
    Resource(
        "model-versions", "model-versions", "id", ("model-version", "versions", "mv"),
        _of(("VERSION", "id"), STATE, ("ENGINE", "engine"), number("CONTEXT", "context_length"), SINCE,
            ("REASON", "reason")),
    ),
    Resource(
        "events", "events", "id", ("event", "ev"),
        _of(Column("AGO", age("at"), right=True), Column("KIND", at("kind"), toned=True), ("ACTOR", "actor"),
            ("MESSAGE", "message")),
    ),
    Resource(
        "ingresses", "ingresses", "id", ("ingress", "ing"),
        _of(("INGRESS", "id"), ("REGION", "region"), ("CONNECTED", "connected"), number("REVISION", "revision"),
            number("WANTED", "wanted_revision"), ("CELLS", "cells")),
    ),
    Resource(
        "routing-tables", "routing-tables", "id", ("routing-table", "rt"),
        _of(("TABLE", "id"), ("CURRENT", "current"), AGE, ("REASON", "reason")),
    ),
    Resource(
        "traffic-policies", "traffic/policies", "deployment", ("traffic-policy", "policies", "tp"),
        _of(("DEPLOYMENT", "deployment"), number("CAP", "utilisation_cap"), ("COST", "cost"),
            ("RESIDENCY", "residency"), ("SPLIT", "split"), number("REVISION", "revision")),
    ),
    Resource(
        "matrices", "traffic/matrices", "deployment", ("matrix", "shares"),
        _of(("DEPLOYMENT", "deployment"), ("SHARES", "shares"), number("REVISION", "revision"),
            Column("MOVED", age("moved_at"), right=True), ("HELD", "held")),
    ),
    Resource(
        "overrides", "traffic/overrides", "id", ("override", "ov"),
        _of(number("ID", "id"), ("KIND", "kind"), ("REGION", "region"), ("DEPLOYMENT", "deployment"),
            ("ACTIVE", "active"), ("MODE", "mode"), ("ACTOR", "actor"), ("WHY", "why")),
    ),
    Resource(
        "evacuations", "traffic/evacuations", "id", ("evacuation",),
        _of(number("ID", "id"), ("REGION", "region"), ("DEPLOYMENT", "deployment"), ("ACTIVE", "active"),
            ("MODE", "mode"), ("ACTOR", "actor"), ("WHY", "why")),
    ),
    Resource(
        "entries", "entry", "name", ("entry",),
        _of(("NAME", "name"), STATE, number("PUBLISHED", "published"), ("WEIGHTS", "weights"), ("SHARES", "shares"),
            ("HELD", "held")),
    ),
    Resource(
        "entry-revisions", "entry-revisions", "id", ("entry-revision",),
        _of(Column("AGO", age("at"), right=True), ("ENTRY", "entry"), number("REVISION", "revision"), STATE,
            ("WEIGHTS", "weights"), ("REASON", "reason")),
    ),
    Resource(
        "shifts", "traffic/history", "id", ("shift", "traffic-history"),
        _of(Column("AGO", age("at"), right=True), ("DEPLOYMENT", "deployment"), ("KIND", "kind"),
            number("MOVED", "moved"), ("REASON", "reason")),
    ),
    Resource(
        "fault-rules", "fault-rules", "rule", ("fault-rule", "rules"),
        _of(("RULE", "rule"), ("MODE", "mode"), ("ACTOR", "actor"), Column("CHANGED", age("changed_at"), right=True)),
    ),
    Resource(
        "engine-allowances", "engine-allowances", "id", ("engine-allowance", "allowances"),
        _of(number("ID", "id"), ("ENGINE", "engine"), ("NAME", "name"), ("ACTOR", "actor"), ("WHY", "why"), AGE),
    ),
    Resource(
        "keys", "keys", "prefix", ("key",),
        _of(("PREFIX", "prefix"), ("NAME", "name"), ("TENANT", "tenant"), STATE, AGE),
    ),
    Resource(
        "certificates", "certificates", "name", ("certificate", "cert", "certs"),
        _of(("NAME", "name"), ("REGION", "region"), ("HOSTS", "names"), ("ISSUER", "issuer"), ("KEY", "key_kind"),
            ("ENDS", "not_after")),
    ),
    Resource(
        "tenant-grants", "tenant-grants", "id", ("tenant-grant",),
        _of(number("ID", "id"), ("TENANT", "tenant"), ("USE", "use"), ("TARGET", "target"), ("ACTOR", "actor"), AGE),
    ),
    Resource(
        "tenant-webhooks", "tenant-webhooks", "id", ("tenant-webhook",),
        _of(number("ID", "id"), ("TENANT", "tenant"), ("URL", "url"), ("ACTOR", "actor"), AGE),
    ),
    Resource(
        "request-queues", "request-queues", "id", ("request-queue",),
        _of(number("ID", "id"), ("NAME", "name"), ("TENANT", "tenant"), ("KEY", "key"), STATE,
            number("WAITING", "waiting"), ("REASON", "reason")),
    ),
    Resource(
        "batches", "batches", "id", ("batch",),
        _of(("ID", "id"), ("TENANT", "tenant"), ("MODEL", "model"), STATE, number("LINES", "lines"),
            number("COMPLETED", "completed"), number("FAILED", "failed"), number("LINES/S", "lines_per_s"),
            ("ENDS ABOUT", "estimated_end_at"), AGE),
    ),
    Resource(
        "benchmarks", "benchmarks", "id", ("benchmark",),
        _of(number("ID", "id"), ("VERSION", "version"), ("TYPE", "instance_type"), STATE, ("WORKLOAD", "workload"),
            ("SLO", "slo"), number("GOODPUT/S", "goodput"), number("BROKE AT", "broke_at"),
            number("AT ONCE", "concurrency"), AGE),
    ),
    Resource(
        "configuration-searches", "configuration-searches", "id", ("configuration-search", "searches"),
        _of(number("ID", "id"), ("AROUND", "version"), ("DEPLOYMENT", "deployment"), STATE, ("WORKLOAD", "workload"),
            ("SLO", "slo"), ("BEST", "best"), ("REASON", "reason"), AGE),
    ),
    Resource(
        "rates", "rates", "id", ("rate",),
        _of(number("ID", "id"), ("KIND", "kind"), ("SUBJECT", "subject"), ("REGION", "region"), ("MARKET", "market"),
            ("FROM", "valid_from"), ("IN FORCE", "in_force"), number("VALUE", "value"), ("BY", "actor")),
    ),
    Resource(
        "budgets", "budgets", "id", ("budget",),
        _of(number("ID", "id"), ("TENANT", "tenant"), ("DEPLOYMENT", "deployment"), ("UNIT", "unit"),
            number("LIMIT", "limit"), number("USED", "used"), number("USED %", "used_percent"),
            ("HARD STOP", "hard_stop"), ("STOPPED", "stopped")),
    ),
    Resource(
        "webhooks", "webhooks", "name", ("webhook",),
        _of(("NAME", "name"), ("URL", "url"), ("ENABLED", "enabled"), ("EVENTS", "events")),
    ),
    Resource(
        "tokens", "tokens", "prefix", ("token",),
        _of(("PREFIX", "prefix"), ("NAME", "name"), ("USER", "user"), STATE, ("SCOPE", "scope"),
            Column("USED", age("last_used_at"), right=True), ("EXPIRES", "expires_at")),
    ),
    Resource(
        "users", "users", "username", ("user",),
        _of(("NAME", "username"), ("ROLE", "role"), ("ACTIVE", "active"), ("GROUPS", "groups"),
            Column("LOGIN", age("last_login"), right=True)),
    ),
    Resource(
        "service-accounts", "service-accounts", "name", ("service-account", "sa"),
        _of(("NAME", "name"), ("ROLE", "role"), ("ACTIVE", "active"), ("DESCRIPTION", "description"), AGE),
    ),
    Resource("groups", "groups", "name", ("group",), ()),
    Resource("grants", "grants", "id", ("grant",), ()),
    Resource("sessions", "sessions", "id", ("session",), ()),
    Resource(
        "approvals", "approvals", "id", ("approval",),
        _of(number("ID", "id"), STATE, ("ACTION", "action"), ("SUMMARY", "summary"), ("BY", "requested_by"),
            Column("ASKED", age("requested_at"), right=True)),
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Resource] = {name: one for one in RESOURCES for name in (one.name, *one.names)}

COLUMNS_MOST = 7
"""Of a list without chosen columns."""


def columns_of(resource: Resource, rows: list[dict[str, Any]]) -> tuple[Column, ...]:
    """Those that were chosen, else the first plain fields."""
    if resource.columns or not rows:
        return resource.columns
    plain = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    return tuple(Column(name.upper().replace("_", " "), at(name)) for name in plain[:COLUMNS_MOST])
