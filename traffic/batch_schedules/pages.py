"""Pages of schedules of batches: the list, one with its runs and actions, and the wizards that create and change one.
They decide nothing: services check and apply."""

from typing import Any

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.urls import reverse

from controlplane.api.apply.planning import Kind
from controlplane.dashboard.actions import Action, ActionMenu, Submission, Target, action_menu, action_view
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
from traffic.batch_schedules.models import SETTABLE, BatchRun, BatchSchedule
from traffic.batch_schedules.planner import RunState
from traffic.batch_schedules.services.schedules import (
    batch_schedule_change,
    batch_schedule_delete,
    batch_schedule_run,
)
from traffic.batch_sinks.models import BatchSink
from traffic.keys.models import ApplicationKey

KEYS_OFFERED = 200
TOPIC = ("batches",)


def _schedules(request: PageRequest) -> "QuerySet[BatchSchedule]":
    return BatchSchedule.objects.select_related("key")


SCHEDULE_LIST: List[BatchSchedule] = List(
    name="schedules",
    columns=(
        Column("schedule", "Schedule", lambda row: row.name, ("name",)),
        Column("state", "State", lambda row: row.state, ("paused",)),
        Column("when", "When", lambda row: row.when, css="wide"),
        Column("tenant", "Tenant", lambda row: row.key.tenant, ("key__tenant",), "wide"),
        Column("next", "Next", lambda row: row.next_at, ("next_at",), "number"),
        Column("problem", "Problem", lambda row: row.problem, css="wide"),
    ),
    query=_schedules,
    order=("name",),
    find=("name", "key__tenant", "prefix", "input"),
)


def _runs(request: PageRequest) -> "QuerySet[BatchRun]":
    return BatchRun.objects.filter(schedule=request.key).select_related("batch")


RUN_LIST: List[BatchRun] = List(
    name="runs",
    prefix="runs-",
    columns=(
        Column("due", "Due", lambda row: row.due_at, ("due_at", "id"), is_newest_first=True),
        Column("state", "State", lambda row: row.state, ("state",), choices=tuple(RunState)),
        Column("input", "Object", lambda row: row.uri, ("uri",), "wide"),
        Column("batch", "Batch", lambda row: row.batch_id, ("batch",)),
        Column("reason", "Reason", lambda row: row.reason, css="wide"),
    ),
    query=_runs,
    order=("-due_at", "-id"),
    find=("uri", "batch__id"),
)


def _schedule(request: PageRequest) -> BatchSchedule:
    row = BatchSchedule.objects.select_related("key").filter(name=request.key).first()
    return found_or_404(row, f"schedule {request.key!r}")


def _actions(request: PageRequest) -> ActionMenu:
    row = request.once(_schedule)
    return action_menu(row, request.caller.access, RUN, RESUME if row.paused else PAUSE, DELETE)


SCHEDULES = Page(
    section="batches",
    title="Schedules",
    fragments=(Fragment("schedules", "", TOPIC, "traffic/batch_schedules/table.html", SCHEDULE_LIST.page),),
    lists=(SCHEDULE_LIST,),
)
SCHEDULE = Page(
    section="batches",
    title="",
    fragments=(
        Fragment("schedule", "", TOPIC, "traffic/batch_schedules/schedule.html", _schedule),
        Fragment("schedule-runs", "Runs", TOPIC, "traffic/batch_schedules/runs.html", RUN_LIST.page),
    ),
    lists=(RUN_LIST,),
    actions=_actions,
)


def _find(key: str) -> BatchSchedule:
    return found_or_404(BatchSchedule.objects.select_related("key").filter(name=key).first(), f"schedule {key!r}")


TARGET: Target[BatchSchedule] = Target(
    noun="schedule",
    find=_find,
    name=lambda row: row.name,
    url=lambda row: reverse("batch-schedule", args=(row.name,)),
    action_url=lambda row, name: reverse("batch-schedule-action", args=(row.name, name)),
)
GONE: Target[BatchSchedule] = Target(
    noun="schedule",
    find=_find,
    name=lambda row: row.name,
    url=lambda row: reverse("batch-schedules"),
    action_url=lambda row, name: reverse("batch-schedule-action", args=(row.name, name)),
)


def _run(form: Submission, row: BatchSchedule) -> None:
    batch_schedule_run(name=row.name, actor=form.actor, now=form.now)


def _pause(form: Submission, row: BatchSchedule) -> None:
    batch_schedule_change(name=row.name, actor=form.actor, now=form.now, paused=True)


def _resume(form: Submission, row: BatchSchedule) -> None:
    batch_schedule_change(name=row.name, actor=form.actor, now=form.now, paused=False)


def _delete(form: Submission, row: BatchSchedule) -> None:
    batch_schedule_delete(name=row.name, actor=form.actor, now=form.now)


RUN = Action(
    target=TARGET,
    name="run",
    label="Run now",
    submit="Run now",
    run=_run,
    effect=lambda row, now: (
        "A batch begins within seconds, unless the batch of an earlier run is open."
        if row.cron
        else "Its prefix is listed within seconds. Each complete object that has no run gets one."
    ),
    why_not=lambda row: "This schedule is paused." if row.paused else "",
)
PAUSE = Action(
    target=TARGET,
    name="pause",
    label="Pause",
    run=_pause,
    effect=lambda row, now: "No further batch begins. Times that pass meanwhile have no run; objects wait.",
)
RESUME = Action(
    target=TARGET,
    name="resume",
    label="Resume",
    run=_resume,
    effect=lambda row, now: "Runs begin again at the next time or listing.",
)
DELETE = Action(
    target=GONE,
    name="delete",
    label="Delete",
    run=_delete,
    typed=lambda row: row.name,
    effect=lambda row, now: "The schedule and the record of its runs are deleted. Its batches continue.",
)
schedule_action = action_view(RUN, PAUSE, RESUME, DELETE)


def _keys(typed: Typed) -> list[Option]:
    rows = ApplicationKey.objects.filter(revoked_at=None).order_by("-id").only("prefix", "name", "tenant")
    return [Option(row.prefix, note=f"{row.name}, tenant {row.tenant}") for row in rows[:KEYS_OFFERED]]


def _sinks(typed: Typed) -> list[Option]:
    key = ApplicationKey.objects.filter(prefix=typed.text("key")).first()
    rows = BatchSink.objects.filter(tenant=key.tenant) if key else BatchSink.objects.none()
    return [Option(row.name, note=row.url) for row in rows[:KEYS_OFFERED]]


def _name_in_url(typed: Typed) -> list[Option]:
    return [Option(typed.text("name"))]


def _documents(values: Values) -> Documents:
    """All fields, so that a field that was emptied is cleared."""
    texts = ("cron", "prefix", "marker", "input", "output_uri", "region")
    spec: dict[str, Any] = dict.fromkeys(texts, "") | {"paused": False, "sinks": []}
    return [document(Kind.BATCH_SCHEDULE, values["name"], spec | nested(values, ("key", *SETTABLE)))]


def _start(request: PageRequest) -> dict[str, str | list[str]]:
    row = get_object_or_404(BatchSchedule, name=request.key)
    texts = {name: str(getattr(row, name)) for name in SETTABLE if name not in {"paused", "sinks"}}
    return {
        "name": row.name,
        "key": row.key_id,
        "sinks": list(row.sinks),
        **texts,
        **({"paused": "on"} if row.paused else {}),
    }


def _input(name: str, **stated: Any) -> Input:
    return Input(name=name, at=f"BatchSchedule.{name}", **stated)


_KEY = _input("key", required=True, options=_keys, help="Its tenant owns the batches. Its limits and models apply.")
_STEPS = (
    Step(
        "When",
        (
            _input("cron", placeholder="30 2 * * *", help="Five fields, or empty for a prefix of objects."),
            _input("time_zone", value="UTC", placeholder="Europe/Berlin"),
            _input("prefix", label="Prefix in S3", placeholder="s3://acme-batches/in"),
            _input("marker", placeholder="none"),
            _input("quiet_s", label="Quiet seconds", value="60"),
        ),
        about="At times, or for each object that arrives below a prefix. A time that a clock change skips runs after "
        "the gap; a repeated one runs once.",
    ),
    Step(
        "Input and results",
        (
            _input("input", placeholder="s3://acme-batches/in/{date}.jsonl"),
            _input("output_uri", label="Also write results to", placeholder="nowhere else"),
            _input("sinks", kind=InputKind.MANY, options=_sinks, follows=True, placeholder="Its tenant has no sinks."),
            _input("endpoint", value="/v1/chat/completions"),
            _input("region", placeholder="any"),
        ),
        about="{date}, {year}, {month}, {day}, {hour} and {minute} are those of a run; {name} is that of its object.",
    ),
    Step(
        "Runs",
        (
            _input("window", label="Time to complete", value="24h"),
            _input("priority", value="5"),
            _input("overlap", value="wait"),
            _input("missed", label="Missed times", value="once"),
            _input("paused"),
        ),
    ),
)
SCHEDULE_WIZARD = Wizard(
    title="New schedule",
    section="batches",
    about="Creates batches of a key at times, or for each object that arrives in a bucket.",
    steps=(
        Step(
            "Schedule",
            (
                Input(
                    name="name",
                    at="BatchSchedule.metadata.name",
                    required=True,
                    placeholder="nightly",
                    help="1 to 64 letters, digits, - and _. It never changes.",
                ),
                _KEY,
            ),
        ),
        *_STEPS,
    ),
    documents=_documents,
    kinds=frozenset({Kind.BATCH_SCHEDULE}),
    creates=frozenset({Kind.BATCH_SCHEDULE}),
    url=lambda documents: reverse("batch-schedule", args=(documents[0]["metadata"]["name"],)),
)
SCHEDULE_CHANGE_WIZARD = Wizard(
    title="Change a schedule",
    section="batches",
    about="Other times or another prefix count from now on. Open batches continue.",
    steps=(
        Step(
            "Schedule",
            (
                Input(
                    name="name",
                    at="BatchSchedule.metadata.name",
                    kind=InputKind.CHOICE,
                    required=True,
                    options=_name_in_url,
                ),
                _KEY,
            ),
        ),
        *_STEPS,
    ),
    documents=_documents,
    kinds=frozenset({Kind.BATCH_SCHEDULE}),
    start=_start,
    url=lambda documents: reverse("batch-schedule", args=(documents[0]["metadata"]["name"],)),
)
