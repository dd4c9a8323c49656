"""Registers and removes releases of the agent, records refused agents, and runs rollouts: the loop `fleet.agents`.
Releases that nothing needs are removed when a controller starts, because that is when releases are added. An order is
stored before the provider is called, and repeated until the agent reports the release, so that a killed controller
costs only the rest of its lease."""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic

import msgspec
import psutil
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import F

from engine_agent.protocol.machine_messages import release_in
from fleet.agents.services.enrolment import AgentIdentity
from fleet.clouds.base import ProviderError, provider_named
from fleet.clouds.local_processes import code_of
from fleet.machines.models import Machine
from fleet.machines.planner import WITH_MACHINE_AGENT
from fleet.machines.selectors import tag_of
from fleet.reconcile.planning.rest import REST_S
from fleet.reconcile.planning.states import (
    AGENT_ROLLOUT_ALLOWED,
    AGENT_ROLLOUT_TEXT,
    AGENT_ROLLOUT_TONE,
    AgentRolloutState,
    MachineState,
)
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.releases.planner import (
    SETTINGS,
    AgentDecision,
    AgentRolloutSettings,
    AgentView,
    ChangeAgentRollout,
    EnterRing,
    MoveAgent,
    Removal,
    RolloutReleases,
    SettleAgent,
    plan_agent_rollout,
    plan_catch_up,
    plan_removal,
    plan_rings,
)
from fleet.releases.selectors import active_rollout, agents_seen, current_release, releases_named, rollout_seen
from fleet.releases.services.archive import (
    LEFT_AFTER_S,
    NoRelease,
    archive_files,
    archives,
    checkout_release,
    own_release,
    release_folder,
    source_keep,
    unfinished_archives_delete,
)
from kernel import clock, live, wake_ups
from kernel.events import event_record
from kernel.leases import lease_release, lease_take, this_holder
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

EVENT_REPEATS_AFTER = timedelta(hours=1)
"""Refused agents retry twice a minute."""

log = logging.getLogger(__name__)


def release_register(checkout: Path | None = None, *, now: datetime) -> AgentRelease:
    """Registers a checkout's release; without a checkout, our own. The first one becomes current. Raises NoRelease if
    the folder has no agent. Raises OSError if it cannot be kept."""
    release = source_keep(checkout) if checkout is not None else own_release()
    row, is_new = AgentRelease.objects.get_or_create(
        id=release.id, defaults={"version": release.version, "protocol": release.protocol, "created_at": now}
    )
    if is_new:
        log.info("release %s is registered", row)
    if not AgentRelease.objects.filter(is_current=True).exists():
        try:
            with transaction.atomic():
                AgentRelease.objects.filter(id=row.id).update(is_current=True)
        except IntegrityError:
            log.info("another controller's release became the current one")
        row.refresh_from_db()
    return row


def launch_release() -> str:
    """Returns the release of agents launched on this computer: the current one, if it is here."""
    current = AgentRelease.objects.filter(is_current=True).first()
    if current is None:
        return ""
    return current.id if release_in(release_folder(current.id)) is not None else own_release().id


def handed_out_release() -> str:
    """Returns the release of joining hosts: the current one, or our own if its archive is not here."""
    current = AgentRelease.objects.filter(is_current=True).first()
    return current.id if current is not None and archives(current.id) else own_release().id


def archives_note(row: AgentRelease) -> None:
    """Records a release's archives on this host, after packing our own Python's. Archives recorded by another host
    stay, because machines accept one digest."""
    found = {one.tag: {"digest": one.digest, "size_bytes": one.path.stat().st_size} for one in archives(row.id)}
    row.archives = {**found, **row.archives}
    AgentRelease.objects.filter(id=row.id).update(archives=row.archives)


def agent_refused(identity: AgentIdentity, reason: str, *, now: datetime) -> None:
    """Records in the timeline, once an hour, why an agent was refused."""
    said = Event.objects.filter(kind="agent.refused", detail__agent=identity.id, at__gt=now - EVENT_REPEATS_AFTER)
    if said.exists():
        return
    with transaction.atomic():
        event_record(
            kind="agent.refused",
            message=reason,
            tone=Tone.BAD,
            now=now,
            region=identity.region,
            node=identity.id if identity.id.startswith("n-") else "",
            detail={"agent": identity.id},
        )


ARCHIVE_KEPT_S = 30 * 24 * 3600.0
"""Homes that share a cache are independent: an archive is deleted after no controller has kept it for so long."""


def releases_refresh(*, now: datetime) -> None:
    """Registers this control plane's release and removes unneeded ones. Errors are logged, because the fleet works
    without it."""
    try:
        release_register(now=now)
    except (DatabaseError, OSError, NoRelease) as error:
        log.error("this control plane's agent release cannot be kept: %s", error)
        return
    try:
        unfinished_archives_delete(now.timestamp())
        releases_trim(now=now)
    except (DatabaseError, OSError) as error:
        log.error("unneeded agent releases cannot be removed: %s", error)


def releases_trim(*, now: datetime) -> tuple[str, ...]:
    """Removes unneeded releases from disk and database, and returns those removed from the database. Releases that
    become needed in the meantime stay, and code of running processes stays on disk until a later start. Raises OSError
    if the cache cannot be created."""
    removal = _plan_removal(now)
    AgentRollout.objects.filter(id__in=removal.rollouts).delete()
    gone = tuple(name for name in removal.releases if _delete_release(name))
    kept = removal.kept | (set(removal.releases) - set(gone))
    _remove_folders(kept, now.timestamp())
    _remove_archives(kept, now.timestamp())
    if gone:
        log.info("removed unneeded agent releases: %s", ", ".join(gone))
    return gone


def _plan_removal(now: datetime) -> Removal:
    rows = list(AgentRelease.objects.order_by("-created_at", "-id"))
    rollouts = [
        RolloutReleases(rollout.pk, rollout.source_id, rollout.target_id, rollout.is_active)
        for rollout in AgentRollout.objects.all()
    ]
    current = {row.id for row in rows if row.is_current}
    return plan_removal([row.id for row in rows], {checkout_release().id, *current, *releases_named(now)}, rollouts)


def _delete_release(release: str) -> bool:
    """A rollout that starts in the meantime references it; then it stays."""
    try:
        with transaction.atomic():
            return AgentRelease.objects.filter(id=release, is_current=False).delete()[0] > 0
    except IntegrityError:
        return False


def _remove_folders(kept: Collection[str], now_s: float) -> None:
    """Of releases and of interrupted copies. Folders younger than an hour may not be registered yet."""
    there = release_folder("").glob("*")
    old = [path for path in there if path.name not in kept and _is_old(path, now_s, LEFT_AFTER_S)]
    running = set(_code_that_runs()) if old else set()
    for path in old:
        if str(path) not in running:
            shutil.rmtree(path, ignore_errors=True)


def _code_that_runs() -> Iterator[str]:
    """Engines and cell proxies keep their code while their agents move to other releases."""
    for process in psutil.process_iter():
        yield from code_of(process).split(os.pathsep)


def _remove_archives(kept: Collection[str], now_s: float) -> None:
    for path, release in archive_files():
        with suppress(OSError):  # another controller removes it, too
            if release in kept:
                os.utime(path, (now_s, now_s))
            elif _is_old(path, now_s, ARCHIVE_KEPT_S):
                path.unlink()


def _is_old(path: Path, now_s: float, after_s: float) -> bool:
    try:
        return now_s - path.stat().st_mtime > after_s
    except OSError:
        return False


LEASE, LEASE_TTL_S = "agents", 15.0
"""A pass renews it before each provider, which may take seconds."""
CATCH_UP_EVERY_S = 10.0
DEFAULT_SOAK_S = 15.0
LONGEST_SOAK_S = 24 * 3600.0


@dataclass
class AgentRollouts:
    """The loop's pass, and the next check for returned agents."""

    settings: AgentRolloutSettings = SETTINGS
    look_again_s: float = 0.0

    def run_pass(self, rest: Callable[[float], None] = lambda _: None) -> bool:
        """Returns False if another process holds the lease. `rest` is called with the seconds for which no pass is
        needed, because there is no rollout: a new one wakes the loop."""
        rollout = active_rollout()
        if rollout is None:
            rest(REST_S)
        if rollout is None and monotonic() < self.look_again_s:
            return True
        if not _take_lease():
            return False
        self.look_again_s = monotonic() + CATCH_UP_EVERY_S
        try:
            agents_roll(now=clock.now(), settings=self.settings)
        finally:
            lease_release(name=LEASE, holder=this_holder(), now=clock.now())
        return True


def _take_lease() -> bool:
    return lease_take(name=LEASE, holder=this_holder(), ttl_s=LEASE_TTL_S, now=clock.now()) is not None


def agents_roll(*, now: datetime, settings: AgentRolloutSettings = SETTINGS) -> int:
    """Plans and applies the next steps. Returns how many."""
    agents = agents_seen(now)
    rollout = active_rollout()
    decisions: Sequence[AgentDecision] = ()
    if rollout is not None:
        gone = _given_up(rollout, agents)
        decisions = plan_agent_rollout(rollout_seen(rollout), agents, now, settings, gone)
    elif (current := current_release()) is not None:
        decisions = plan_catch_up(current.id, agents, now, settings)
    for decision in decisions:
        log.info("%s", decision)
        _apply_rollout_step(decision, rollout, now)
    _tell_providers(agents, now)
    return len(decisions)


def _given_up(rollout: AgentRollout, agents: Sequence[AgentView]) -> list[str]:
    unsettled = AgentMove.objects.filter(rollout=rollout, moved_at__isnull=False, settled_at=None)
    return list(unsettled.exclude(agent__in=[agent.id for agent in agents]).values_list("agent", flat=True))


def agent_rollout_begin(
    *, release: str, actor: str, now: datetime, soak_s: float = DEFAULT_SOAK_S, why: str = ""
) -> AgentRollout:
    """Starts to move all agents to a release; "": this control plane's. Raises InvalidInput if the release is unknown,
    or a host's archive is missing. Raises Conflict if a rollout is under way, or all agents run the release."""
    target = _target_release(release, now)
    _require_archives(target, current_release())
    with transaction.atomic():
        source = AgentRelease.objects.select_for_update().filter(is_current=True).first() or target
        if (active := active_rollout()) is not None:
            raise Conflict(f"agents are moving to {active.target}: wait, or cancel with `switchyard agents cancel`")
        agents = agents_seen(now)
        behind = [agent for agent in agents if agent.release != target.id]
        if not behind and source == target:
            raise Conflict(f"every agent runs {target} already")
        rings = plan_rings(agents)
        rollout = _rollout_create(
            source, target, rings=max(1, len(rings)), soak_s=soak_s, actor=actor, why=why, now=now
        )
        for number, ring in enumerate(rings):
            for agent in ring:
                columns = {"rollout": rollout, "ring": number, "release": target.id}
                AgentMove.objects.update_or_create(agent=agent, defaults={**columns, **_NOT_MOVED})
        reason = f": {why}" if why else ""
        _rollout_event(
            rollout, f"{actor} upgrades {_count_text(len(behind), len(agents))} to {target}{reason}", now, actor
        )
        wake_ups.send("fleet.agents")
    return rollout


def _count_text(some: int, of: int) -> str:
    return f"{some} of {of} agent{'' if of == 1 else 's'}"


def _rollout_create(
    source: AgentRelease, target: AgentRelease, *, rings: int, soak_s: float, actor: str, why: str, now: datetime
) -> AgentRollout:
    try:
        with transaction.atomic():
            return AgentRollout.objects.create(
                source=source,
                target=target,
                state=AgentRolloutState.RUNNING.value,
                rings=rings,
                soak_s=soak_s,
                actor=actor,
                why=why,
                created_at=now,
                ring_since=now,
            )
    except IntegrityError:
        raise Conflict("another upgrade has just started: check it and try again") from None


_NOT_MOVED: Mapping[str, object] = {"moved_at": None, "before": None, "settled_at": None, "trouble": ""}


def _target_release(release: str, now: datetime) -> AgentRelease:
    row = AgentRelease.objects.filter(id=release).first() if release else release_register(now=now)
    if row is None:
        there = ", ".join(AgentRelease.objects.values_list("id", flat=True)) or "none"
        raise InvalidInput(
            field="release", rule="exists", message=f"there is no release {release!r}; there are: {there}"
        )
    return row


def _require_archives(target: AgentRelease, current: AgentRelease | None) -> None:
    """Every host must be able to move there, and back after a failure."""
    hosts = Machine.objects.filter(provider__in=WITH_MACHINE_AGENT).exclude(facts=None).exclude(state=MachineState.GONE)
    tags = {tag_of(facts) for machine in hosts if (facts := machine.stated_facts())}
    back = () if current is None or current == target else ((current, ", needed to roll back,"),)
    for row, which in ((target, ""), *back) if tags else ():
        archives_note(row)
        if lacking := sorted(tags - set(row.archives)):
            made = "`manage.py agent_archive` makes one"
            message = f"release {row}{which} has no archive for {', '.join(lacking)}: {made}"
            raise InvalidInput(field="release", rule="archive", message=message)


def agent_rollout_cancel(*, rollout_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Moves the agents back to the previous release. Raises Conflict if it is going back or is over."""
    with transaction.atomic():
        rollout = AgentRollout.objects.select_for_update().get(pk=rollout_id)
        if rollout.state != AgentRolloutState.RUNNING:
            said = AGENT_ROLLOUT_TEXT[AgentRolloutState(rollout.state)]
            raise Conflict(f"upgrade {rollout.pk} {said} already")
        reason = f"cancelled by {actor}" + (f": {why}" if why else "")
        _set_rollout_state(rollout, AgentRolloutState.ROLLING_BACK, reason, now, actor)


def _apply_rollout_step(decision: AgentDecision, rollout: AgentRollout | None, now: datetime) -> None:
    with transaction.atomic():
        if isinstance(decision, MoveAgent):
            _store_move(decision, now)
        elif isinstance(decision, SettleAgent):
            AgentMove.objects.filter(agent=decision.agent, rollout=decision.rollout).update(settled_at=now)
        elif rollout is not None and isinstance(decision, EnterRing):
            rows = AgentRollout.objects.filter(pk=rollout.pk, revision=rollout.revision)
            if rows.update(ring=decision.ring, ring_since=now, reason=decision.reason, revision=F("revision") + 1):
                _rollout_event(rollout, f"the upgrade of agents to {rollout.target} continues: {decision.reason}", now)
        elif rollout is not None and isinstance(decision, ChangeAgentRollout):
            _set_rollout_state(rollout, decision.to, decision.reason, now)
        live.push("agents")


def _set_rollout_state(
    rollout: AgentRollout, to: AgentRolloutState, reason: str, now: datetime, actor: str = "switchyard"
) -> None:
    if to not in AGENT_ROLLOUT_ALLOWED[AgentRolloutState(rollout.state)]:
        raise ValueError(f"an upgrade of agents cannot go from {rollout.state} to {to}")
    rows = AgentRollout.objects.filter(pk=rollout.pk, revision=rollout.revision)
    ends = not AGENT_ROLLOUT_ALLOWED[to]
    kept = f"{rollout.reason}; {reason}" if to is AgentRolloutState.ROLLED_BACK and rollout.reason else reason
    changed = rows.update(state=to.value, reason=kept, revision=F("revision") + 1, ended_at=now if ends else None)
    if not changed:
        return
    if to is AgentRolloutState.SUCCEEDED:
        AgentRelease.objects.filter(is_current=True).update(is_current=False)
        AgentRelease.objects.filter(id=rollout.target_id).update(is_current=True)
    rollout.state = to.value
    _rollout_event(rollout, f"the upgrade of agents to {rollout.target} {AGENT_ROLLOUT_TEXT[to]}: {kept}", now, actor)
    wake_ups.send("fleet.agents")


def _rollout_event(rollout: AgentRollout, message: str, now: datetime, actor: str = "switchyard") -> None:
    state = AgentRolloutState(rollout.state)
    event_record(kind=f"agents.{state}", message=message, tone=AGENT_ROLLOUT_TONE[state], now=now, actor=actor)
    live.push("agents")


def _store_move(decision: MoveAgent, now: datetime) -> None:
    move, _ = AgentMove.objects.select_for_update().get_or_create(
        agent=decision.agent, defaults={"release": decision.release}
    )
    AgentMove.objects.filter(pk=move.pk).update(
        rollout=decision.rollout,
        ring=decision.ring,
        release=decision.release,
        moved_at=now,
        before=msgspec.to_builtins(decision.before),
        settled_at=None,
        attempt=move.attempt + 1,
        trouble="",
    )
    if Machine.objects.filter(id=decision.agent).update(desired_version=F("desired_version") + 1):
        live.push_desired([decision.agent])


def _tell_providers(agents: Sequence[AgentView], now: datetime) -> None:
    """Moves agents whose last reported release differs from their order, and those that report none: an older report
    may precede a fault. Machines receive it with their orders."""
    told = {move.agent: move for move in AgentMove.objects.filter(moved_at__isnull=False)}
    wanted: dict[str, dict[str, str]] = {}
    for agent in agents:
        move = told.get(agent.id)
        runs_it = agent.connected and move is not None and move.release == agent.release
        if move is not None and not runs_it and not move.trouble:
            wanted.setdefault(agent.provider, {})[agent.id] = move.release
    for provider, releases in wanted.items():
        if not _take_lease():
            return  # another process continues
        try:
            troubles = provider_named(provider).move_agents(releases)
        except ProviderError as error:
            troubles = dict.fromkeys(releases, str(error))
        for agent_id, trouble in troubles.items():
            log.error("%s cannot change its release: %s", agent_id, trouble)
            AgentMove.objects.filter(agent=agent_id).update(trouble=trouble)
