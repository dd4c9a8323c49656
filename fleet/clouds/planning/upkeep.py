"""Decisions of the loop `fleet.cloud`: image moves, ownership of the clouds, garbage collection, and the figures for
CloudWatch. Pure. An image move launches one unit from the new image first. Once it has been ready for a while the other
machines follow, one spare or whole cell at a time, announced like a provider's notice, so that replacements come first
and the disruption ledger applies; two failed boots roll it back. Ownership is an object in the install's bucket: each
write requires the version that this install wrote before, so that a copied database becomes read-only. Garbage is what
no row references in two complete lists and a grace period apart; each list deletes a limited number. If too many
resources of a kind have no record, the records are probably wrong (an old backup), and the kind is held."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from fleet.reconcile.planning.states import NodeState
from kernel.tones import Tone


class ImageState(StrEnum):
    """`asked`: the cloud has not confirmed the image. `canary`: one unit is tried. `back`: machines on the new image
    are replaced by the old one. `refused`: never started."""

    ASKED = "asked"
    CANARY = "canary"
    ROLLING = "rolling"
    BACK = "back"
    DONE = "done"
    REFUSED = "refused"


IMAGE_TONE = {
    ImageState.ASKED: Tone.MOVING,
    ImageState.CANARY: Tone.MOVING,
    ImageState.ROLLING: Tone.MOVING,
    ImageState.BACK: Tone.BAD,
    ImageState.DONE: Tone.OK,
    ImageState.REFUSED: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`healthy_s`: seconds for which all nodes of the canary must be ready. `failed_most`: tolerated failed boots."""

    healthy_s: float = 600.0
    failed_most: int = 1


SETTINGS = ImageSettings()


@dataclass(frozen=True, slots=True)
class ImageMachine:
    """A machine that may run. `unit`: of its launch. `cell`: of its node, "" for a spare. `is_new`: launched from the
    new image. `is_leaving`: its end was announced."""

    node: str
    unit: str
    cell: str
    is_new: bool
    state: NodeState
    state_since: datetime
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class ImageStep:
    """`leave`: nodes whose end is announced now. `booted`, `failed`: nodes that became ready and units that failed to
    boot, so far."""

    state: ImageState
    reason: str
    booted: frozenset[str]
    failed: frozenset[str]
    leave: tuple[str, ...] = ()


def takes_new(state: ImageState, machines: Sequence[ImageMachine], open_units: Collection[str]) -> bool:
    """Whether the next launch uses the new image; during the canary, only if no launch is open. `open_units`: units
    whose launch from it is open."""
    if state is ImageState.CANARY:
        return not open_units and not any(one.is_new and one.state is not NodeState.LOST for one in machines)
    return state is ImageState.ROLLING


def plan_image(
    state: ImageState,
    machines: Sequence[ImageMachine],
    booted: Collection[str],
    failed: Collection[str],
    now: datetime,
    settings: ImageSettings = SETTINGS,
) -> ImageStep:
    """Returns the next step of a move. `booted` and `failed`: of the previous step."""
    new = [one for one in machines if one.is_new]
    seen = frozenset(booted) | {one.node for one in new if one.state is NodeState.READY}
    lost = frozenset(failed) | {one.unit for one in new if one.state is NodeState.LOST and one.node not in seen}
    if state in (ImageState.CANARY, ImageState.ROLLING) and len(lost) > settings.failed_most:
        return ImageStep(ImageState.BACK, f"{len(lost)} launches from it did not boot", seen, lost)
    if state is ImageState.CANARY:
        tried = _canary_state(new, now, settings)
        if tried is not None:
            return ImageStep(*tried, seen, lost)
    to_go = [one for one in machines if one.is_new is (state is ImageState.BACK) and one.state is not NodeState.LOST]
    if state is not ImageState.CANARY and not to_go:
        ended = "all went back" if state is ImageState.BACK else "all machines run it"
        return ImageStep(ImageState.DONE, ended, seen, lost)
    waits = _wait_reason(machines, to_go)
    leave = () if waits else _next_place(machines, to_go)
    reason = waits or (
        f"{', '.join(leave)} leaves for it" if leave else "no machine runs: it is tried by the next launch"
    )
    return ImageStep(state, reason, seen, lost, leave)


def _canary_state(new: Sequence[ImageMachine], now: datetime, settings: ImageSettings) -> tuple[ImageState, str] | None:
    """The canary's result; None: not launched."""
    trying = [one for one in new if one.state is not NodeState.LOST]
    if not trying:
        return None
    if any(one.state is not NodeState.READY for one in trying):
        return ImageState.CANARY, "the first unit boots"
    since = max(one.state_since for one in trying)
    left_s = settings.healthy_s - (now - since).total_seconds()
    if left_s > 0:
        return ImageState.CANARY, f"the first unit has been ready since {since:%H:%M:%S} UTC"
    return ImageState.ROLLING, f"the first unit was ready for {settings.healthy_s:.0f} s"


def _wait_reason(machines: Sequence[ImageMachine], to_go: Sequence[ImageMachine]) -> str:
    """Why no more machines may leave now, or "". One place at a time."""
    leaving = sorted(one.node for one in machines if one.is_leaving)
    if leaving:
        return f"{', '.join(leaving)} leaves"
    going = {one.node for one in to_go}
    booting = sorted(one.node for one in machines if one.state is NodeState.JOINING and one.node not in going)
    return f"{', '.join(booting)} boots" if booting else ""


def _next_place(machines: Sequence[ImageMachine], to_go: Sequence[ImageMachine]) -> tuple[str, ...]:
    """Spares first, because cells use them. A cell leaves as a whole, whatever its images."""
    if not to_go:
        return ()
    first = min(to_go, key=lambda one: (bool(one.cell), one.cell, one.node))
    if not first.cell:
        return (first.node,)
    return tuple(sorted(one.node for one in machines if one.cell == first.cell))


@dataclass(frozen=True, slots=True)
class ZoneBase:
    """`zone_id` is the same in all accounts; a zone's name is not."""

    subnet: str
    zone_id: str


@dataclass(frozen=True, slots=True)
class ClusterBase:
    """The ECS cluster of a region, from its stack. Roles are ARNs; images have a digest or an immutable tag."""

    name: str
    task_role: str
    ingress_role: str
    execution_role: str
    image: str
    ingress_image: str
    log_group: str


@dataclass(frozen=True, slots=True)
class CloudBase:
    """Network, roles and addresses of a region, from its stack; stored as `CloudRegion.base`. `zones` by name. Groups
    are security groups; that of nodes allows all traffic within itself. Profiles are ARNs of instance profiles, roles
    the names of their roles, by which machines prove their identity. Empty if the stack has none. `root_devices`: root
    volume names by image, `root_device` for other images.

    `load_balancer` and `load_balancer_zone`: DNS name and hosted zone of the region's entry, for an alias;
    `target_groups`: ARNs for its ingresses, `tls`, `plain`, `grpc` or `plain_grpc`. `hosted_zone` and `entry_name`: of
    the weighted records of all regions. `home`: the AWS region of the install's alarm; empty: this region. `cluster`:
    if machines are container instances of ECS; the roles are then those of tasks."""

    account: str
    zones: dict[str, ZoneBase]
    node_group: str
    node_profile: str
    node_role: str
    ingress_group: str = ""
    ingress_profile: str = ""
    ingress_role: str = ""
    bucket: str = ""
    queue_url: str = ""
    dead_letter_url: str = ""
    target_groups: dict[str, str] = field(default_factory=dict)
    hosted_zone: str = ""
    entry_name: str = ""
    load_balancer: str = ""
    load_balancer_zone: str = ""
    home: str = ""
    root_devices: dict[str, str] = field(default_factory=dict)
    root_device: str = "/dev/xvda"
    root_gib: int = 200
    cluster: ClusterBase | None = None

    def root_device_of(self, image: str) -> str:
        """Returns an image's name for its root volume."""
        return self.root_devices.get(image, self.root_device)


NAMESPACE = "Switchyard"
"""The only one that the control plane's policy allows."""
DIMENSION = "Install"
PASS_COUNTS_S = 60.0
"""Age up to which a reconciler pass counts: the alarm's period."""


@dataclass(frozen=True, slots=True)
class InstallFigures:
    """`reconciled_s`: seconds since the reconciler's last complete pass, `last_pass_s`: of the control loop that is
    furthest behind. Both are None before the first pass."""

    cells_wanted: int
    cells_ready: int
    incidents_open: int
    reconciled_s: float | None
    last_pass_s: float | None


def metrics_request(install: str, figures: InstallFigures) -> dict[str, Any]:
    """Returns all figures as one `PutMetricData` call. Without timestamps: CloudWatch uses the time of arrival, which a
    wrong local clock cannot shift."""
    was_reconciled = figures.reconciled_s is not None and figures.reconciled_s <= PASS_COUNTS_S
    values: list[tuple[str, float, str]] = [
        ("CompletedPasses", float(was_reconciled), "Count"),
        ("CellsWanted", figures.cells_wanted, "Count"),
        ("CellsReady", figures.cells_ready, "Count"),
        ("OpenIncidents", figures.incidents_open, "Count"),
    ]
    if figures.last_pass_s is not None:
        values.append(("LastPassAge", figures.last_pass_s, "Seconds"))
    of_this = [{"Name": DIMENSION, "Value": install}]
    data = [
        {"MetricName": name, "Dimensions": of_this, "Value": float(value), "Unit": unit} for name, value, unit in values
    ]
    return {"Namespace": NAMESPACE, "MetricData": data}


STALE_AFTER = timedelta(minutes=15)
"""Without a written beat for so long nothing is changed: another install may have taken over."""


class Verdict(StrEnum):
    OWNER = "owner"
    LOST = "lost"
    AGAIN = "again"


def beat_verdict(*, was_written: bool | None, nonce_there: str | None, nonce_tried: str) -> Verdict:
    """Returns the result of a write. `was_written`: None if the answer was lost. `nonce_there`: in the object, read
    after a failed write; None if unreadable. `nonce_tried`: stored before the write, to recognise an own write whose
    answer was lost."""
    if was_written:
        return Verdict.OWNER
    if was_written is None or nonce_there is None:
        return Verdict.AGAIN
    return Verdict.OWNER if nonce_there == nonce_tried else Verdict.LOST


def stale_reason(beat_at: datetime | None, now: datetime) -> str:
    """Returns why nothing may be changed although no other owner is known, or "". Installs without a bucket never beat
    and are trusted."""
    if beat_at is None or now - beat_at <= STALE_AFTER:
        return ""
    return f"its object in the bucket was last written at {beat_at:%Y-%m-%d %H:%M} UTC"


class ResourceKind(StrEnum):
    MACHINE = "machine"
    VOLUME = "volume"
    INTERFACE = "network interface"
    SPOT_REQUEST = "spot request"
    FILE = "file"
    TASK = "task"


@dataclass(frozen=True, slots=True)
class Resource:
    """A listed resource. `is_recorded`: a row exists, even if that row says that the resource should be gone.
    `created_at` None: not stated; its age counts from the first list with it."""

    kind: ResourceKind
    id: str
    is_referenced: bool
    is_recorded: bool = False
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class GarbagePolicy:
    """`deleted_at_once`: for each kind and list. A kind is held while more than `unknown_least` resources, and more
    than `unknown_most_share` of the machines, have no record. Limits that are None do not apply."""

    grace_period_s: float
    lists: int = 2
    deleted_at_once: int | None = None
    unknown_least: int | None = None
    unknown_most_share: float = 0.0

    def is_over(self, since: datetime, now: datetime) -> bool:
        return (now - since).total_seconds() >= self.grace_period_s


PROVIDER_MACHINES = GarbagePolicy(grace_period_s=0.0, deleted_at_once=5, unknown_least=2, unknown_most_share=0.25)
"""Providers are listed once a minute, longer than a launch takes to be recorded."""
CLOUD_RESOURCES = GarbagePolicy(grace_period_s=600.0, deleted_at_once=5, unknown_least=5, unknown_most_share=0.2)
"""Lists of a cloud lag behind by minutes."""
FILES = GarbagePolicy(grace_period_s=86_400.0, lists=1)
"""An upload takes less than a day, and its row is written last."""


@dataclass(frozen=True, slots=True)
class GarbagePlan:
    """`suspects`: since when each unreferenced resource has been listed, by ID. `held`: why some kinds are left alone,
    or ""."""

    delete: tuple[Resource, ...]
    suspects: Mapping[str, datetime]
    held: str = ""


def plan_garbage_collection(
    found: Sequence[Resource],
    before: Mapping[str, datetime],
    now: datetime,
    policy: GarbagePolicy,
    *,
    machines: int = 0,
    has_records: bool = True,
) -> GarbagePlan:
    """Returns the plan for a complete list. `before`: suspects of the previous complete list. `machines`: those that
    the policy's share refers to. `has_records`: whether any launch is recorded; if none is, everything is held."""
    garbage = [one for one in found if not one.is_referenced]
    suspects = {one.id: before.get(one.id, now) for one in garbage}
    delete: list[Resource] = []
    held = []
    for kind in ResourceKind:
        same = [one for one in garbage if one.kind is kind]
        unknown = sum(not one.is_recorded for one in same)
        if reason := _keep_reason(kind, unknown, machines, has_records, policy):
            held.append(reason)
            continue
        seen = (one for one in same if policy.lists == 1 or one.id in before)
        old = (one for one in seen if policy.is_over(one.created_at or suspects[one.id], now))
        delete += sorted(old, key=lambda one: one.id)[: policy.deleted_at_once]
    return GarbagePlan(tuple(delete), suspects, "; ".join(held))


def _keep_reason(kind: ResourceKind, unknown: int, machines: int, has_records: bool, policy: GarbagePolicy) -> str:
    if unknown and not has_records:
        return f"{kind}: {unknown} have no record, and no launch is recorded at all"
    if policy.unknown_least is None or unknown <= max(policy.unknown_least, policy.unknown_most_share * machines):
        return ""
    return f"{kind}: {unknown} have no record, compared with {machines} machines; were records lost?"
