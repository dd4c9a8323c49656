"""Releases of the agent on the page of machines: the releases in use, the newest rollout, and the actions to start and
cancel one."""

from dataclasses import dataclass

from django.http import Http404, HttpResponse
from django.shortcuts import redirect

from controlplane.dashboard.actions import Submission, action, page_target, refuse_newer
from controlplane.dashboard.fragments import Fragment, PageRequest
from controlplane.dashboard.lists import Column, List
from engine_agent.protocol.machine_messages import version_text
from fleet.releases.api import UpgradeSerializer
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.releases.selectors import active_rollout, agents_by_release
from fleet.releases.services.archive import checkout_release
from fleet.releases.services.releases import agent_rollout_begin, agent_rollout_cancel
from kernel.tones import Tone

NAMES_SHOWN = 12
UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A release and the number of agents that run it. `names`: the first ones; `more`: how many are not named."""

    release: AgentRelease
    count: int
    names: tuple[str, ...]
    more: int

    @property
    def state(self) -> str:
        return "current" if self.release.is_current else "not current" if self.count else "unused"

    @property
    def tone(self) -> Tone:
        return {"current": Tone.OK, "not current": Tone.WARN}.get(self.state, Tone.IDLE)


@dataclass(frozen=True, slots=True)
class RingRow:
    """A ring: its agents, and how many are healthy with the new release. `moves`: some, those with trouble first;
    `more`: how many are not listed. After the rollout only those with trouble are listed."""

    number: int
    count: int
    settled: int
    moves: tuple[AgentMove, ...]
    more: int
    is_moving: bool


@dataclass(frozen=True, slots=True)
class AgentList:
    """`own`: this control plane's release. `behind`: agents with another release than the current one; `strange`: those
    without a known release, and what they run."""

    own: str
    rows: tuple[ReleaseRow, ...]
    behind: int
    strange: tuple[tuple[str, tuple[str, ...], int], ...]
    rollout: AgentRollout | None
    rings: tuple[RingRow, ...]
    others: tuple[AgentRelease, ...]


def agent_list() -> AgentList:
    """Releases with their agents, the current one first, and the newest rollout."""
    running = agents_by_release()
    known = sorted(AgentRelease.objects.all(), key=lambda row: not row.is_current)
    current = next((row.id for row in known if row.is_current), UNKNOWN)
    ids = {row.id for row in known}
    rollout = AgentRollout.objects.select_related("source", "target").first()
    own = checkout_release()
    return AgentList(
        own=version_text(own.version, own.id),
        rows=tuple(_release_row(row, running.get(row.id, [])) for row in known),
        behind=sum(len(names) for release, names in running.items() if release != current),
        strange=tuple(
            (release, tuple(names[:NAMES_SHOWN]), max(0, len(names) - NAMES_SHOWN))
            for release, names in running.items()
            if release not in ids
        ),
        rollout=rollout,
        rings=_ring_rows(rollout) if rollout is not None else (),
        others=tuple(known),
    )


def _release_row(release: AgentRelease, names: list[str]) -> ReleaseRow:
    return ReleaseRow(release, len(names), tuple(names[:NAMES_SHOWN]), max(0, len(names) - NAMES_SHOWN))


def _ring_rows(rollout: AgentRollout) -> tuple[RingRow, ...]:
    shown = rollout.moves.all() if rollout.is_active else rollout.moves.exclude(trouble="")
    moves = sorted(shown, key=lambda move: (not move.trouble, move.settled_at is not None, move.agent))
    rings = []
    for number in range(rollout.rings):
        mine = [move for move in moves if move.ring == number]
        if mine:
            settled = sum(move.settled_at is not None for move in mine)
            named, more = tuple(mine[:NAMES_SHOWN]), max(0, len(mine) - NAMES_SHOWN)
            is_moving = rollout.is_active and rollout.ring == number
            rings.append(RingRow(number + 1, len(mine), settled, named, more, is_moving))
    return tuple(rings)


def _agents(request: PageRequest) -> AgentList:
    return agent_list()


RELEASE_LIST: List[ReleaseRow] = List(
    name="agent-releases",
    prefix="releases-",
    columns=(
        Column("release", "Release", lambda row: row.release.pk),
        Column("state", "State", lambda row: row.state, choices=("current", "not current", "unused")),
        Column("version", "Version", lambda row: row.release.version, css="wide"),
        Column("protocol", "Protocol", lambda row: row.release.protocol, css="wide number"),
        Column("agents", "Agents", lambda row: row.count, css="number", is_newest_first=True),
        Column("names", "Run by", lambda row: ", ".join(row.names), css="wide"),
        Column("known", "Known for", lambda row: row.release.created_at, css="wide number", is_newest_first=True),
    ),
    query=lambda request: request.once(_agents).rows,
    find=("release", "version", "names"),
    by_value=True,
    above=lambda request: request.once(_agents),
)
AGENTS = Fragment("agents", "Agents", ("agents", "nodes", "traffic"), "fleet/releases/agents.html", RELEASE_LIST.page)


@action(page_target("machines", "agents"))
def agents_upgrade_action(form: Submission, _: None) -> HttpResponse:
    body = form.valid(UpgradeSerializer, "release", "soak_s", "why")
    if (last := AgentRollout.objects.first()) is not None:
        sent = f"{body['release'] or 'the own release of this control plane'}, watched for {body['soak_s']:g} s"
        refuse_newer(form, last.created_at, f"upgrade {last.pk} to {last.target_id} was started by {last.actor}", sent)
    agent_rollout_begin(actor=form.actor, now=form.now, **body)
    return redirect("machines")


@action(page_target("machines", "agents"))
def agents_cancel_action(form: Submission, _: None) -> HttpResponse:
    rollout = active_rollout()
    if rollout is None:
        raise Http404("No upgrade of agents is under way.")
    agent_rollout_cancel(rollout_id=rollout.pk, actor=form.actor, now=form.now, why=form.text("why"))
    return redirect("machines")
