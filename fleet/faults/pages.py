"""The list of incidents, the page of one with its story, report, actions and those on its node, runbooks, and the
fleet's health in numbers. Services decide."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from accounts.models import Approval, ApprovalState
from controlplane.dashboard.actions import WHY, Action, ActionMenu, Field, Submission, Target, action_view
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List, ListPage
from fleet.cells.models import Cell
from fleet.faults.models import Incident, IncidentPart, Replacement
from fleet.faults.planning.report import Healing, Impact, TenantImpact, report_markdown
from fleet.faults.planning.severity import RUNBOOK_OF_KIND, SEVERITY_TONE
from fleet.faults.planning.story import WAITS, Evidence, Story, evidence_in_units
from fleet.faults.planning.views import PartNoun
from fleet.faults.selectors.stories import affected_by, deployments_hit, healing_of, impact_of, postmortem_of, story_of
from fleet.faults.services.incidents import incident_dismiss
from fleet.faults.services.triage import NOTE_MAX, incident_acknowledge, incident_assign, incident_note_add
from fleet.nodes.models import Node
from fleet.nodes.pages import DRAIN, REPLACE, UNCORDON, node_find
from fleet.reconcile.planning.states import CELL_TONE, CellState, IncidentState, NodeState
from fleet.recorder.pages.why import time_line_fragment
from fleet.recorder.planning.reasons import Subject
from fleet.requests.pages import Place, request_fragments
from kernel import clock
from kernel.access import Role, require
from kernel.control_hosts import ControlHosts, control_hosts
from kernel.control_standing import ControlStanding
from kernel.loop_passes import control_standing
from kernel.one_query import counts
from kernel.time_ranges import TimeRange
from kernel.tones import Tone
from traffic.usage.selectors.usage import tenants_hit

RELATED_SHOWN = 20
RELATED_WITHIN = timedelta(hours=1)
REQUESTS_BEFORE = timedelta(minutes=15)
BAD_CELL_STATES = tuple(state for state, tone in CELL_TONE.items() if tone is Tone.BAD)


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """The fleet in numbers. `problems`: open incidents outside shadow mode, and broken cells without an incident.
    `approvals`: pending ones. `control`: delays of the control loops; `hosts`: those of the control plane."""

    incidents: int
    cells: int
    cells_ready: int
    cells_unexplained: int
    nodes: int
    approvals: int
    control: ControlStanding
    hosts: ControlHosts

    @property
    def problems(self) -> int:
        return self.incidents + self.cells_unexplained


def _listed(request: PageRequest) -> "QuerySet[Incident]":
    """Open incidents unless `state` is `closed` or `all`."""
    state, text = request.text("state"), request.text("q")
    incidents = Incident.objects.all() if state == "all" else Incident.objects.filter(state=state or IncidentState.OPEN)
    if text:
        words = ("kind", "subject", "summary", "region", "deployment", "cell", "node")
        about = Q()
        for word in words:
            about |= Q(**{f"{word}__icontains": text})
        incidents = incidents.filter(about)
    return incidents


INCIDENT_LIST: List[Incident] = List(
    name="incidents",
    columns=(
        Column("incident", "Incident", lambda row: row.summary, ("summary",)),
        Column("state", "State", lambda row: row.state, ("state",)),
        Column("severity", "Severity", lambda row: row.severity, css="wide"),
        Column("owner", "Owner", lambda row: row.owner, ("owner",), "wide"),
        Column("kind", "Kind", lambda row: row.kind, ("kind",), "wide"),
        Column("region", "Region", lambda row: row.region, ("region",), "wide"),
        Column("cell", "Cell", lambda row: row.cell, ("cell",), "wide"),
        Column("node", "Node", lambda row: row.node, ("node",), "wide"),
        Column("opened", "Opened", lambda row: row.opened_at, ("opened_at",), "number", is_newest_first=True),
        Column("closed", "Closed", lambda row: row.closed_at, ("closed_at",), "wide number", is_newest_first=True),
    ),
    query=_listed,
    order=("-id",),
    filters=("state", "q"),
)


@dataclass(frozen=True, slots=True)
class IncidentPage:
    """One incident. `waits`: why nothing is replaced for it yet, or ""."""

    incident: Incident
    replacements: tuple[Replacement, ...]
    healing: Healing

    @property
    def severity_tone(self) -> Tone:
        return SEVERITY_TONE[self.incident.severity] if self.incident.state == IncidentState.OPEN else Tone.IDLE

    @property
    def waits(self) -> str:
        return str(self.incident.evidence.get(WAITS, "")) if self.incident.state == IncidentState.OPEN else ""

    @property
    def nodes(self) -> list[str]:
        """Of an incident about a machine or device with several nodes."""
        named = self.incident.evidence.get("nodes")
        return [str(name) for name in named] if isinstance(named, list) and not self.incident.node else []


def incident_find(incident_id: str) -> Incident | None:
    known = incident_id.isascii() and incident_id.isdigit() and len(incident_id) < 18
    rows = Incident.objects.prefetch_related("parts", "notes")
    return rows.filter(pk=int(incident_id)).first() if known else None


def incident_page(incident: Incident) -> IncidentPage:
    work = tuple(Replacement.objects.filter(incident=incident).order_by("-id"))
    return IncidentPage(incident, work, healing_of(incident))


def related_to(incident: Incident, now: datetime) -> ListPage[Incident]:
    """Incidents about the same nodes, cells or cohort within an hour."""
    affected = affected_by(incident)
    same = Q(node__in=affected.nodes) | Q(cell__in=affected.cells)
    if incident.cohort:
        same |= Q(cohort=incident.cohort)
    near = Q(opened_at__range=(incident.opened_at - RELATED_WITHIN, incident.opened_at + RELATED_WITHIN))
    fetched = list(Incident.objects.filter(same & near).exclude(pk=incident.pk)[: RELATED_SHOWN + 1])
    return INCIDENT_LIST.part(fetched, now, RELATED_SHOWN)


def cells_in_incidents() -> QuerySet[IncidentPart, str]:
    """Names of the cells that open incidents hit."""
    open_ones = IncidentPart.objects.filter(
        noun=PartNoun.CELL.value, incident__state=IncidentState.OPEN, incident__shadow=False
    )
    return open_ones.values_list("name", flat=True)


def fleet_health() -> FleetHealth:
    open_ones = Incident.objects.filter(state=IncidentState.OPEN, shadow=False)
    explained = Q(Exists(open_ones.filter(cell=OuterRef("pk")))) | Q(pk__in=cells_in_incidents())
    broken = Q(state__in=BAD_CELL_STATES)
    cells = Cell.objects.exclude(state=CellState.STOPPED).aggregate(
        total=Count("pk"),
        ready=Count("pk", filter=Q(state=CellState.READY)),
        unexplained=Count("pk", filter=broken & ~explained),
    )
    incidents, nodes, approvals = counts(
        open_ones,
        Node.objects.exclude(state=NodeState.RETIRED),
        Approval.objects.filter(state=ApprovalState.PENDING.value),
    )
    return FleetHealth(
        incidents=incidents,
        cells=cells["total"],
        cells_ready=cells["ready"],
        cells_unexplained=cells["unexplained"],
        nodes=nodes,
        approvals=approvals,
        control=control_standing(),
        hosts=control_hosts(),
    )


def _incident_filter(request: PageRequest) -> Filter:
    options = (("", "open"), (IncidentState.CLOSED.value, "closed"), ("all", "open and closed"))
    state = choose_labelled(request, "state", options)
    return Filter(text_label="Find by kind, subject or text", text_name="q", text=request.text("q"), choices=(state,))


INCIDENTS = Page(
    section="incidents",
    title="Incidents",
    fragments=(Fragment("incidents-list", "", ("incidents",), "fleet/faults/list.html", INCIDENT_LIST.page),),
    narrow=_incident_filter,
    lists=(INCIDENT_LIST,),
)


def _incident(request: PageRequest) -> Incident:
    return found_or_404(incident_find(request.key), f"incident {request.key!r}")


def _incident_page(request: PageRequest) -> IncidentPage:
    return incident_page(request.once(_incident))


def _incident_evidence(request: PageRequest) -> Evidence:
    return evidence_in_units(request.once(_incident).evidence)


def _incident_related(request: PageRequest) -> ListPage[Incident]:
    return related_to(request.once(_incident), request.now)


def _incident_story(request: PageRequest) -> Story:
    return story_of(request.once(_incident), now=request.now)


def _tenants_hit(incident: Incident, now: datetime) -> tuple[TenantImpact, ...]:
    return tenants_hit(deployments_hit(incident), incident.opened_at, incident.closed_at or now)


def _incident_impact(request: PageRequest) -> Impact:
    incident, story = request.once(_incident), request.once(_incident_story)
    return impact_of(incident, story.start, now=request.now, tenants=_tenants_hit(incident, request.now))


def _requests_of_incident(request: PageRequest) -> Place | None:
    """From a quarter of an hour before it, so that there are ordinary requests."""
    incident = request.once(_incident)
    if not (incident.cell or incident.deployment):
        return None
    span = TimeRange("", incident.opened_at - REQUESTS_BEFORE, incident.closed_at or request.now)
    if incident.cell:
        return Place(span, cell=incident.cell)
    return Place(span, deployment=incident.deployment, region=incident.region)


@never_cache
@require_safe
def incident_report(request: HttpRequest, key: str) -> HttpResponse:
    """The post-mortem as a Markdown file."""
    if not request.user.is_authenticated:
        return redirect_to_login(request.get_full_path())
    require(request, Role.VIEWER)
    incident, now = found_or_404(incident_find(key), f"incident {key!r}"), clock.now()
    report = postmortem_of(incident, now=now, tenants=_tenants_hit(incident, now))
    headers = {"Content-Disposition": f'attachment; filename="{report.file_name}"'}
    return HttpResponse(report_markdown(report), content_type="text/markdown; charset=utf-8", headers=headers)


def _runbook(request: PageRequest) -> str:
    """The text of a runbook. Only names of runbooks reach the file system, which may lack the documentation."""
    path = settings.BASE_DIR / "docs" / "runbooks" / f"{request.key}.md"
    text = path.read_text() if request.key in set(RUNBOOK_OF_KIND.values()) and path.is_file() else None
    return str(found_or_404(text, f"runbook {request.key!r}"))


TOPICS = ("incidents", "nodes")
NODE_MENU = (REPLACE, DRAIN, UNCORDON)
"""Actions on its node that an incident may need."""


def _dismiss(form: Submission, incident: Incident) -> None:
    incident_dismiss(incident_id=incident.pk, actor=form.actor, now=form.now, why=form.text("why"))


TARGET = Target(
    noun="incident",
    find=lambda incident_id: found_or_404(incident_find(str(incident_id)), f"incident {incident_id}"),
    name=lambda incident: f"incident {incident.pk}",
    url=lambda incident: reverse("incident", args=(incident.pk,)),
    action_url=lambda incident, name: reverse("incident-action", args=(incident.pk, name)),
)
DISMISS_EFFECT = "It closes. For an hour the same fault opens no incident and replaces nothing without new evidence."
DISMISS = Action(
    target=TARGET,
    name="dismiss",
    label="Dismiss",
    run=_dismiss,
    fields=(WHY,),
    effect=lambda incident, now: DISMISS_EFFECT,
    why_not=lambda incident: "" if incident.state == IncidentState.OPEN else "This incident is closed.",
)


def _why_not_acknowledged(incident: Incident) -> str:
    if incident.state != IncidentState.OPEN:
        return "This incident is closed."
    return f"{incident.acknowledged_by} acknowledged it." if incident.acknowledged_by else ""


def _acknowledge(form: Submission, incident: Incident) -> None:
    incident_acknowledge(incident_id=incident.pk, actor=form.actor, now=form.now, why=form.text("why"))


def _assign(form: Submission, incident: Incident) -> None:
    fields = {name: form.text(name) for name in ("owner", "why")}
    incident_assign(incident_id=incident.pk, actor=form.actor, now=form.now, **fields)


def _note(form: Submission, incident: Incident) -> None:
    text = form.text("text", longest=NOTE_MAX + 1)
    incident_note_add(incident_id=incident.pk, text=text, actor=form.actor, now=form.now)


ACKNOWLEDGE = Action(
    target=TARGET,
    name="acknowledge",
    label="Acknowledge",
    run=_acknowledge,
    fields=(WHY,),
    effect=lambda incident, now: "Others see that you know of it. You become its owner unless it has one.",
    why_not=_why_not_acknowledged,
)
ASSIGN = Action(
    target=TARGET,
    name="assign",
    label="Assign",
    run=_assign,
    fields=lambda incident: (Field("owner", "Owner, a user's name; empty for none", value=incident.owner), WHY),
    effect=lambda incident, now: f"Its owner is {incident.owner or 'nobody'} now.",
    words=("owner",),
)
NOTE = Action(
    target=TARGET,
    name="note",
    label="Add a note",
    submit="Add the note",
    run=_note,
    fields=(Field("text", "Note", kind="textarea", required=True, most=NOTE_MAX),),
    effect=lambda incident, now: "It stays with the incident, in its story and in its report.",
    words=("comment",),
)
INCIDENT_ACTIONS = (ACKNOWLEDGE, ASSIGN, NOTE, DISMISS)
incident_action = action_view(*INCIDENT_ACTIONS)


def _incident_actions(request: PageRequest) -> ActionMenu:
    """Its own actions, and those on its node."""
    incident, access = request.once(_incident), request.caller.access
    row = node_find(node_id=incident.node, now=request.now) if incident.node else None
    items = [each.menu_item(row.node, access) for each in NODE_MENU] if row else []
    on_node = (replace(item, label=f"{item.label} node") for item in items)
    return ActionMenu((*(each.menu_item(incident, access) for each in INCIDENT_ACTIONS), *on_node))


INCIDENT = Page(
    section="incidents",
    title="",
    actions=_incident_actions,
    fragments=(
        Fragment("incident", "", TOPICS, "fleet/faults/incident.html", _incident_page),
        Fragment("incident-story", "Story", (*TOPICS, "events"), "fleet/faults/story.html", _incident_story),
        Fragment(
            "incident-impact", "Impact on users", (*TOPICS, "history"), "fleet/faults/impact.html", _incident_impact
        ),
        *request_fragments(_requests_of_incident),
        time_line_fragment(Subject.INCIDENT),
        Fragment("incident-evidence", "Evidence", TOPICS, "fleet/faults/evidence.html", _incident_evidence),
        Fragment("incident-actions", "What is done about it", TOPICS, "fleet/faults/actions.html", _incident_page),
        Fragment("incident-related", "Related", TOPICS, "fleet/faults/related.html", _incident_related),
    ),
)

RUNBOOK = Page(
    section="incidents",
    title="",
    fragments=(Fragment("runbook", "", (), "fleet/faults/runbook.html", _runbook),),
)
