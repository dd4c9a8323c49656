"""Reads the flight recorder: why something was decided, and recorded rounds with their inputs. Never writes."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Any, TypeVar

from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import Max, Min, Q, Value
from django.db.models.functions import Concat

from fleet.cells.models import Cell
from fleet.clouds.models import CapacityPool
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident
from fleet.nodes.models import Node
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import MemberView
from fleet.reconcile.planning.states import CellState, NodeState, RolloutState
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.recorder.models import RecordedRound, RoundSubject
from fleet.recorder.planning.current import PausedPool, Present
from fleet.recorder.planning.encoding import CannotDecode, decode_rounds
from fleet.recorder.planning.explanations import RECONCILER
from fleet.recorder.planning.loops import RecordedLoop, Round
from fleet.recorder.planning.moments import Moment
from fleet.recorder.planning.reasons import Alternative, Subject, decision_words
from fleet.recorder.planning.states_then import CellThen, NodeThen, RolloutThen, StatesThen, TargetThen, decode_states
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE, rollouts_described

T = TypeVar("T")

BEFORE_INCIDENT = timedelta(seconds=60)
AFTER_OPENING = timedelta(minutes=10)
"""An incident that stays open explains no more rounds than these."""
Loops = Mapping[str, RecordedLoop]
"""Loops by name. All of them are known in `controlplane.explained`, because some belong to traffic."""
ABOUT = ("id", "loop", "base_id", "at", "planner", "decided", "reasons", "schema", "release")


@dataclass(frozen=True, slots=True)
class StoredReason:
    """A decision and why, as it was stored. `inputs`, `limits`: by name. `has_choices`: it chose among several.
    `alternatives`: None if they were not requested, or are unknown."""

    round: int
    at: datetime
    decision: str
    planner: str
    rule: str
    reason: str
    subjects: tuple[str, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    has_choices: bool = False
    alternatives: tuple[Alternative, ...] | None = None

    @property
    def words(self) -> str:
        return decision_words(self.decision)

    @property
    def inputs_text(self) -> str:
        return _values_text(self.inputs)

    @property
    def limits_text(self) -> str:
        return _values_text(self.limits)


def _values_text(values: Mapping[str, Any]) -> str:
    """`silence 12 s, connected False`; a name that ends in `_s` is in seconds."""
    return ", ".join(_value_text(name, value) for name, value in values.items())


def _value_text(name: str, value: Any) -> str:
    plain = name.removesuffix("_s").replace("_", " ")
    if isinstance(value, bool):
        return f"{plain} {'yes' if value else 'no'}"
    shown = f"{value:g}" if isinstance(value, float) else value
    return f"{plain} {shown} s" if name.endswith("_s") and isinstance(value, int | float) else f"{plain} {shown}"


def reasons_about(subject: str, limit: int, loops: Loops) -> list[StoredReason]:
    """The newest decisions about `cell:c-1`, newest first. Two queries."""
    newest = RoundSubject.objects.filter(subject=subject).order_by("-round").values_list("round", flat=True)[:limit]
    rows = RecordedRound.objects.filter(pk__in=list(newest)).order_by("-id").only(*ABOUT)
    told = (reason for row in rows for reason in reversed(_reasons_of(row, loops.get(row.loop))))
    return list(islice((reason for reason in told if subject in reason.subjects), limit))


def _reasons_of(row: RecordedRound, loop: RecordedLoop | None) -> list[StoredReason]:
    return [
        StoredReason(
            row.pk,
            row.at,
            one["decision"],
            one["planner"],
            one["rule"],
            one["reason"],
            tuple(one["subjects"]),
            one.get("inputs", {}),
            one.get("limits", {}),
            has_choices=loop is not None and one["decision"] in loop.with_choices,
        )
        for one in row.reasons
    ]


def alternatives_of(reason: StoredReason, loops: Loops) -> tuple[Alternative, ...]:
    """The other choices of a stored decision, from its recorded round. Raises CannotDecode."""
    row = round_by_id(reason.round)
    for _, one in rounds_decoded([row] if row else [], loops):
        loop = loops[row.loop] if row else RECONCILER
        explained = loop.explain(one)
        for part in one.decided:
            for decision in part.decisions:
                is_kind = type(decision).__name__ == reason.decision
                if is_kind and explained(decision, part.planner).subjects == reason.subjects:
                    return loop.alternatives(one, decision)
    return ()


Decode = Callable[[Sequence[bytes], str, Sequence[bool]], Iterator[T]]
"""Decodes the wanted rows of a chain with this schema."""


def rounds_decoded(rows: Iterable[RecordedRound], loops: Loops) -> Iterator[tuple[RecordedRound, Round]]:
    """These rows with their rounds, by chain, oldest first. Reads each chain once. Raises CannotDecode if a chain's
    inputs were deleted, or are of another release's types."""
    rows = list(rows)
    loop_of = {row.base_id or row.pk: loops.get(row.loop, RECONCILER) for row in rows}

    def decode(base: int) -> Decode[Round]:
        return lambda chain, schema, wanted: decode_rounds(loop_of[base], chain, schema, wanted=wanted)

    return _decoded(rows, decode)


def _decoded(
    rows: Iterable[RecordedRound], decode_of: "Callable[[int], Decode[T]]"
) -> Iterator[tuple[RecordedRound, T]]:
    """`decode_of`: the base of a chain -> how its rows are decoded."""
    chains: dict[int, dict[int, RecordedRound]] = defaultdict(dict)
    for row in rows:
        chains[row.base_id or row.pk][row.pk] = row
    for base, wanted in sorted(chains.items()):
        stored = _chain(base, max(wanted))
        chain = [bytes(inputs) for _, inputs, _, _ in stored if inputs]
        if len(chain) < len(stored):
            raise CannotDecode(f"the inputs of round {min(wanted)} were deleted; they are kept for 7 days")
        pks = [pk for pk, *_ in stored]
        _, _, schema, release = stored[0]
        try:
            decoded = decode_of(base)(chain, schema, [pk in wanted for pk in pks])
            yield from zip((wanted[pk] for pk in pks if pk in wanted), decoded, strict=True)
        except CannotDecode as wrong:
            raise CannotDecode(
                f"round {min(wanted)} was recorded by release {release} and cannot be replayed: {wrong}"
            ) from None


def _chain(base: int, last: int) -> list[tuple[int, bytes | None, str, str]]:
    whole = RecordedRound.objects.filter(pk=base)
    rest = RecordedRound.objects.filter(base=base, pk__lte=last)
    columns = ("pk", "inputs", "schema", "release")
    return [*whole.values_list(*columns), *rest.order_by("pk").values_list(*columns)]


def rounds_of_incident(incident: Incident, limit: int) -> list[RecordedRound]:
    """Recorded rounds with decisions about an incident's objects, from shortly before it opened until it closed, oldest
    first."""
    until = min(incident.closed_at or datetime.max.replace(tzinfo=incident.opened_at.tzinfo), _last_of(incident))
    within = RecordedRound.objects.filter(at__gte=incident.opened_at - BEFORE_INCIDENT, at__lte=until)
    ends = within.aggregate(first=Min("id"), last=Max("id"))
    if ends["first"] is None:
        return []
    about = RoundSubject.objects.filter(
        subject__in=subjects_of(incident), round__gte=ends["first"], round__lte=ends["last"]
    )
    rounds = about.order_by("round").values_list("round", flat=True).distinct()[:limit]
    return list(RecordedRound.objects.filter(pk__in=list(rounds)).order_by("id").only(*ABOUT))


def _last_of(incident: Incident) -> datetime:
    return incident.opened_at + AFTER_OPENING


def subjects_of(incident: Incident) -> list[str]:
    """Subjects of decisions about an incident: its own, its node and cell, else its deployment or region."""
    found = [Subject.INCIDENT.named(f"{incident.kind}/{incident.subject}")]
    if incident.node or incident.cell:
        named = ((Subject.NODE, incident.node), (Subject.CELL, incident.cell))
    else:
        named = ((Subject.DEPLOYMENT, incident.deployment), (Subject.REGION, incident.region))
    return [*found, *(kind.named(name) for kind, name in named if name)]


def round_by_id(pk: int) -> RecordedRound | None:
    return RecordedRound.objects.filter(pk=pk).only(*ABOUT).first()


def present(now: datetime) -> Present:
    """Explanations of the fleet as it is now. Loads the whole fleet."""
    settings = FleetSettings()
    pools = CapacityPool.objects.filter(paused_until__gt=now, enabled=True).order_by("region_id", "position")
    pauses = [
        PausedPool(pool.region_id, pool.instance_type_id, str(pool), pool.pause_reason, pool.paused_until)
        for pool in pools
        if pool.paused_until is not None
    ]
    return Present(fleet_view(now=now, settings=settings), settings, now, pauses)


@dataclass(frozen=True, slots=True)
class Recording:
    """The recording around a time. `moment` None: it cannot be shown, for the reason in `trouble`. `before` and
    `after`: times of the recorded rounds around it, if any; `after` None: nothing was recorded since, so the present
    counts."""

    at: datetime
    moment: Moment | None
    before: datetime | None = None
    after: datetime | None = None
    trouble: str = ""


def recording_at(at: datetime, now: datetime) -> Recording:
    """The fleet as it was at `at`."""
    rounds = RecordedRound.objects.filter(loop=RECONCILER.name).only("id", "base_id", "at")
    before = rounds.filter(at__lte=at).order_by("-at", "-id").first()
    after = rounds.filter(at__gt=at).order_by("at", "id").first()
    after_at = after.at if after else None
    if before is None:
        return Recording(at, None, None, after_at, "Nothing was recorded before this time.")
    try:
        known = _states_of([before, after] if after else [before])
    except CannotDecode as wrong:
        return Recording(at, None, before.at, after_at, f"It cannot be shown: {wrong}.")
    later = known[after.pk] if after else PresentStates()
    return Recording(at, Moment(at, known[before.pk], later), before.at, after_at)


ROWS_KEPT = 50_000
"""Rows of decoded states in a process: at most 20 MB. Those of 5,000 nodes with 2,500 cells are 7,500 rows."""
_states: OrderedDict[int, StatesThen] = OrderedDict()
"""States of recorded rounds by their ID, the last used at the end. Recordings never change, and are the same for all
users."""
_states_lock = Lock()


def _states_of(rounds: Sequence[RecordedRound]) -> dict[int, StatesThen]:
    """The states of recorded rounds by ID. Raises CannotDecode."""
    with _states_lock:
        known = {row.pk: _states[row.pk] for row in rounds if row.pk in _states}
    missing = [row for row in rounds if row.pk not in known]
    found = {row.pk: states for row, states in _decoded(missing, lambda base: decode_states)}
    with _states_lock:
        for pk in known.keys() & _states.keys():
            _states.move_to_end(pk)
        _states.update(found)
        while len(_states) > 1 and sum(states.size for states in _states.values()) > ROWS_KEPT:
            _states.popitem(last=False)
    return known | found


class PresentStates:
    """The states after the last recorded round. Each kind is loaded when it is first read, in one query."""

    @cached_property
    def cells(self) -> dict[str, CellThen]:
        rows = Cell.objects.exclude(state=CellState.STOPPED.value).annotate(
            version=Concat("model_version__model_id", Value("@"), "model_version__version"),
            places=ArrayAgg("members__node_id", order_by="members__rank", filter=Q(members__isnull=False), default=[]),
        )
        columns = ("id", "deployment_id", "region_id", "state", "state_since", "generation", "version", "reason")
        return {
            name: CellThen(
                name, deployment, region, CellState(state), since, generation, version, reason, _members(places)
            )
            for name, deployment, region, state, since, generation, version, reason, places in rows.values_list(
                *columns, "places"
            )
        }

    @cached_property
    def nodes(self) -> dict[str, NodeThen]:
        rows = Node.objects.exclude(state=NodeState.RETIRED.value).order_by("region_id", "id")
        columns = ("id", "region_id", "instance_type_id", "state", "state_since", "cordoned")
        return {
            name: NodeThen(name, region, kind, NodeState(state), since, cordoned)
            for name, region, kind, state, since, cordoned in rows.values_list(*columns)
        }

    @cached_property
    def rollouts(self) -> dict[str, RolloutThen]:
        return {
            row.deployment_id: RolloutThen(
                row.pk,
                row.deployment_id,
                row.to_version.reference,
                RolloutState(row.state),
                row.state_since,
                row.reason,
            )
            for row in rollouts_described().filter(state__in=ACTIVE)
        }

    @cached_property
    def deployments(self) -> dict[str, TargetThen]:
        targets: dict[str, dict[str, int]] = defaultdict(dict)
        for place in DeploymentRegion.objects.all():
            targets[place.deployment_id][place.region_id] = place.cells_in_force
        return {name: TargetThen(cells) for name, cells in targets.items()}


def _rollout_then(row: Rollout) -> RolloutThen:
    to, state = row.to_version.reference, RolloutState(row.state)
    return RolloutThen(row.pk, row.deployment_id, to, state, row.state_since, row.reason)


def _members(nodes: Sequence[str]) -> tuple[MemberView, ...]:
    return tuple(MemberView(node, rank) for rank, node in enumerate(nodes))
