"""The loop `fleet.cloud` over cloud regions: lists, launches, places, notices and prices, each in its interval; the
ownership of the clouds; incidents of launches that need an operator; and the figures for CloudWatch. Each region has
its own thread and lease, so that one that does not answer delays no other, and two controllers do not call twice. A
region whose last round still runs is skipped; a hanging round is logged, and passes do not count as complete. The
worker sends the figures, not the control loops, so that an alarm fires when the loops fail."""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

from django.db import connection
from django.db.models import Sum

from engine_agent.protocol.strict_json import strict_loads
from fleet.capacity.planning.pools import LaunchOutcome, Market
from fleet.cells.models import Cell
from fleet.clouds.aws import calls
from fleet.clouds.aws.actions import quota_name
from fleet.clouds.aws.calls import CallFailed, Refused
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.listing import region_places, reservation_places
from fleet.clouds.models import CloudRegion, Install, LaunchAttempt
from fleet.clouds.planning.call_budget import GARBAGE_EVERY_S, LIST_EVERY_S, RESERVATIONS_EVERY_S, STATUS_EVERY_S
from fleet.clouds.planning.upkeep import InstallFigures, Verdict, beat_verdict, metrics_request
from fleet.clouds.services.alarms import cloud_alarms
from fleet.clouds.services.clusters import cluster_definitions, cluster_instances, cluster_list, cluster_queue
from fleet.clouds.services.garbage import cloud_garbage_collect, cloud_list
from fleet.clouds.services.images import cloud_images
from fleet.clouds.services.metrics import cloud_metrics_read
from fleet.clouds.services.notices import cloud_queue, cloud_reservations, cloud_statuses
from fleet.clouds.services.regions import (
    AWS,
    ECS,
    cloud_new_types_read,
    cloud_prices,
    cloud_region_read,
    cloud_spot_prices,
)
from fleet.clouds.services.starts import start_incidents
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.reconcile.planning.rest import REST_S
from fleet.reconcile.planning.states import CellState, CloudRegionState, IncidentState
from kernel import clock
from kernel.leases import lease_take, this_holder
from kernel.loop_passes import control_standing
from kernel.refusals import Conflict

KEY = "control/owner.json"
READ_ONLY = "cloud-read-only"
ABSENT = frozenset({"NoSuchKey", "404"})
CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
OBJECT_MOST = 4096

log = logging.getLogger(__name__)


def cloud_beat(cloud: CloudRegion, now: datetime) -> None:
    """Writes the ownership object again if the install uses this region's bucket: the first region with one."""
    holder = _beat_region()
    if holder is None or holder.pk != cloud.pk:
        return
    install = install_ensure(now)
    if install.read_only:
        return
    if not install.beat_nonce:
        install.beat_nonce = secrets.token_hex(16)
        install.save(update_fields=["beat_nonce"])
    etag, was_written = _write_beat(holder, install, now)
    there = _read_beat(holder) if was_written is False else None
    verdict = beat_verdict(
        was_written=was_written, nonce_there=there[1] if there else None, nonce_tried=install.beat_nonce
    )
    if verdict is Verdict.OWNER:
        new_etag = etag or (there[0] if there else "")
        Install.objects.filter(pk=install.pk).update(beat_etag=new_etag, beat_nonce="", beat_at=clock.now())
    elif verdict is Verdict.LOST:
        _become_read_only(install, holder, now)


def _beat_region() -> CloudRegion | None:
    ready = CloudRegion.objects.filter(state=CloudRegionState.READY).order_by("region__position", "pk")
    return next((row for row in ready if row.stated_base().bucket), None)


def _write_beat(holder: CloudRegion, install: Install, now: datetime) -> tuple[str, bool | None]:
    """The object's new version and True; False: another version exists; None: unknown."""
    body = json.dumps({"install": install.pk, "nonce": install.beat_nonce, "at": now.isoformat()}).encode()
    condition: dict[str, Any] = {"IfMatch": install.beat_etag} if install.beat_etag else {"IfNoneMatch": "*"}
    bucket = holder.stated_base().bucket
    try:
        answer = calls.call("s3", "PutObject", holder.aws_region, Bucket=bucket, Key=KEY, Body=body, **condition)
    except calls.Refused as error:
        if error.code in CHANGED or error.http_status == 412:
            return "", False
        log.warning("the owner's object in %s was not written: %s", bucket, error)
        return "", None
    except calls.Unanswered as error:
        log.warning("whether the owner's object in %s was written is not known: %s", bucket, error)
        return "", None
    return str(answer["ETag"]), True


def _read_beat(holder: CloudRegion) -> tuple[str, str] | None:
    """Version and nonce of the object; None: unreadable."""
    bucket = holder.stated_base().bucket
    try:
        answer = calls.call("s3", "GetObject", holder.aws_region, Bucket=bucket, Key=KEY)
        content = strict_loads(answer["Body"].read(OBJECT_MOST))
        return str(answer["ETag"]), str(content["nonce"])
    except (calls.CallFailed, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the owner's object in %s could not be read: %s", bucket, error)
        return None


def _become_read_only(install: Install, holder: CloudRegion, now: datetime) -> None:
    bucket = holder.stated_base().bucket
    reason = f"another control plane wrote s3://{bucket}/{KEY}; `manage.py aws_claim --confirm {install.pk}` takes over"
    Install.objects.filter(pk=install.pk).update(read_only=reason, beat_nonce="")
    log.error("clouds are read-only: %s", reason)
    incident_open(kind=READ_ONLY, subject=install.pk, summary=f"Clouds are read-only: {reason}", evidence={}, now=now)


def cloud_claim(*, confirm: str, now: datetime) -> Install:
    """Takes over the clouds from the last writer, which becomes read-only with its next beat. Raises Conflict if the
    name is not this install's, or the object cannot be read."""
    install, holder = install_ensure(now), _beat_region()
    if confirm != install.pk:
        raise Conflict(f"this install is {install.pk}, not {confirm!r}; nothing was changed")
    if holder is None:
        raise Conflict("no region of a cloud has a bucket; there is nothing to take over")
    there = _read_beat(holder)
    if there is None:
        raise Conflict(f"s3://{holder.stated_base().bucket}/{KEY} cannot be read; nothing was changed")
    columns = {"read_only": "", "beat_etag": there[0], "beat_nonce": "", "beat_at": now}
    Install.objects.filter(pk=install.pk).update(**columns)
    incidents_close(kind=READ_ONLY, resolution="an operator took the clouds over", now=now)
    return install_ensure(now)


# Places of machines and reservations in the network of a region.

WAIT_MOST_S = 0.6
"""Wait for the own call budget, 0.8 calls a second: without a wait, every second of the one-second steps would get no
call; with it, every fourth. The region's other steps wait as long."""


def cloud_places(cloud: CloudRegion, now: datetime, wait: Callable[[float], None] = time.sleep) -> None:
    """Reads the places of one batch. Batches without budget follow with the next step."""
    try:
        try:
            region_places(cloud, now)
        except Refused as refused:
            if refused.not_before is None:
                raise
            left_s = (refused.not_before - clock.now()).total_seconds()
            if left_s <= WAIT_MOST_S:
                wait(max(0.0, left_s))
                region_places(cloud, now)
    except CallFailed as error:
        if not (isinstance(error, Refused) and error.not_before is not None):
            log.warning("topology of region %s was not read: %s", cloud.pk, error)


def cloud_reservation_places(cloud: CloudRegion, _: datetime) -> None:
    try:
        reservation_places(cloud)
    except CallFailed as error:
        log.warning("topology of reservations in region %s was not read: %s", cloud.pk, error)


# Incidents of launches that need an operator: a quota is too small, or the cloud refuses them. They are closed once
# machines of that type are launched again, or no launch was tried for an hour.

KINDS = {LaunchOutcome.NO_QUOTA: "no-quota", LaunchOutcome.REFUSED: "launch-refused"}
LOOKED_BACK = timedelta(hours=1)
"""As long as pools pause for a quota."""


def launch_incidents(cloud: CloudRegion, now: datetime) -> None:
    """Opens and closes incidents by the last attempt of each instance type in a region."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in KINDS.values()}
    for name, attempt in _last_attempts(cloud, now).items():
        outcome = LaunchOutcome(attempt.outcome)
        if outcome in KINDS:
            found[KINDS[outcome]][f"{cloud.pk}/{name}"] = _launch_summary(cloud, name, attempt, outcome)
    for kind, summaries in found.items():
        rows = Incident.objects.filter(kind=kind, region=cloud.pk, state=IncidentState.OPEN.value)
        for subject in set(rows.values_list("subject", flat=True)) - set(summaries):
            incidents_close(kind=kind, subject=subject, resolution="a later launch had another outcome", now=now)
        for subject, summary in summaries.items():
            incident_open(kind=kind, subject=subject, summary=summary, evidence={}, now=now, region=cloud.pk)


def _last_attempts(cloud: CloudRegion, now: datetime) -> dict[str, LaunchAttempt]:
    """By instance type: of the last hour, with a known outcome."""
    rows = LaunchAttempt.objects.filter(unit__region_id=cloud.pk, ended_at__gt=now - LOOKED_BACK)
    return {row.unit.instance_type_id: row for row in rows.select_related("unit").order_by("ended_at", "pk")}


def _launch_summary(cloud: CloudRegion, name: str, attempt: LaunchAttempt, outcome: LaunchOutcome) -> str:
    if outcome is LaunchOutcome.REFUSED:
        return f"{cloud.pk} refuses to launch {name}: {attempt.text}"
    quota = quota_name(name, Market(attempt.pool_seen["market"]))
    return f"{cloud.pk} has no quota for more {name}: ask for more of {quota!r} ({attempt.text})"


LEASE_S = 60.0
"""Longer than the longest call, and renewed before each step."""
ROUND_LIMIT_S = 300.0
BEAT_EVERY_S = 60.0
INCIDENTS_EVERY_S = 15.0
IMAGES_EVERY_S = 10.0
"""More often than nodes that did not boot are kept."""
ALARMS_EVERY_S = 30.0
METRICS_EVERY_S = 60.0
"""CloudWatch's shortest period of most services. A call costs money for each metric."""
QUEUE_EVERY_S = 1.0
"""Interruption warnings come only two minutes ahead."""
TOPOLOGY_LOOK_S = 1.0
"""Between two batches of places; no call while all are known."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of each region with its interval. An exception does not stop the other steps."""

    every_s: float
    run: Callable[[CloudRegion, datetime], None]


SPOT_PRICES_EVERY_S = 3600.0
READ_AGAIN_S = 60.0
"""Of a refused stack, which an operator is fixing, and for types that the fleet names for the first time."""
CLUSTER_EVERY_S = 30.0
"""Lists of an ECS cluster: two calls for each 100 tasks or container instances."""
READ_DAILY_S = 86_400.0
"""Of a stack in use, to find additions."""

STEPS: Mapping[str, Step] = {
    "beat": Step(BEAT_EVERY_S, cloud_beat),
    "queue": Step(QUEUE_EVERY_S, cloud_queue),
    "statuses": Step(STATUS_EVERY_S, cloud_statuses),
    "reservations": Step(RESERVATIONS_EVERY_S, cloud_reservations),
    "places": Step(TOPOLOGY_LOOK_S, cloud_places),
    "reservation places": Step(RESERVATIONS_EVERY_S, cloud_reservation_places),
    "list": Step(LIST_EVERY_S, cloud_list),
    "garbage": Step(GARBAGE_EVERY_S, cloud_garbage_collect),
    "stack": Step(READ_DAILY_S, cloud_region_read),
    "new types": Step(READ_AGAIN_S, cloud_new_types_read),
    "prices": Step(READ_DAILY_S, cloud_prices),
    "spot prices": Step(SPOT_PRICES_EVERY_S, cloud_spot_prices),
    "images": Step(IMAGES_EVERY_S, cloud_images),
    "incidents": Step(INCIDENTS_EVERY_S, launch_incidents),
    "alarms": Step(ALARMS_EVERY_S, cloud_alarms),
    "metrics": Step(METRICS_EVERY_S, cloud_metrics_read),
}
"""In this order; all due steps run in one round."""

CLUSTER_STEPS: Mapping[str, Step] = {
    "beat": Step(BEAT_EVERY_S, cloud_beat),
    "queue": Step(QUEUE_EVERY_S, cluster_queue),
    "container instances": Step(CLUSTER_EVERY_S, cluster_instances),
    "list": Step(CLUSTER_EVERY_S, cluster_list),
    "stack": Step(READ_DAILY_S, cloud_region_read),
    "definitions": Step(READ_DAILY_S, cluster_definitions),
    "images": Step(IMAGES_EVERY_S, cloud_images),
    "incidents": Step(INCIDENTS_EVERY_S, launch_incidents),
    "starts": Step(INCIDENTS_EVERY_S, start_incidents),
    "alarms": Step(ALARMS_EVERY_S, cloud_alarms),
    "metrics": Step(METRICS_EVERY_S, cloud_metrics_read),
}
"""Of a region that is an ECS cluster. Names that both have are kept apart by region."""

UNREAD_STEPS: Mapping[str, Step] = {"first stack": Step(READ_AGAIN_S, cloud_region_read)}
"""Of a region that is not ready: its stack is not read, or was refused."""


class CloudUpkeep:
    """The rounds of this process. One thread makes the passes."""

    def __init__(self, now_s: Callable[[], float] = monotonic, steps: Mapping[str, Step] = STEPS) -> None:
        self._now_s = now_s
        self._steps = {AWS: steps, ECS: CLUSTER_STEPS}
        self._due_s: dict[tuple[str, str], float] = {}
        self._rounds: dict[str, tuple[threading.Thread, float]] = {}

    def run_pass(self, rest: Callable[[float], None] = lambda _: None) -> bool:
        """Starts a round in each region with due steps. Returns False if one hangs. `rest` is called with the seconds
        for which no pass is needed, because there is no region: a new one wakes the loop."""
        self._rounds = {region: (thread, at) for region, (thread, at) in self._rounds.items() if thread.is_alive()}
        clouds = list(CloudRegion.objects.filter(region__provider__in=self._steps).select_related("region"))
        for cloud in clouds:
            due = [name for name in self._steps_of(cloud) if self._now_s() >= self._due_s.get((cloud.pk, name), 0.0)]
            if due and cloud.pk not in self._rounds:
                self._start_round(cloud, due)
        hanging = [region for region, (_, at) in self._rounds.items() if self._now_s() - at > ROUND_LIMIT_S]
        for region in hanging:
            log.error("a round in region %s has not ended for %.0f s", region, ROUND_LIMIT_S)
        if not clouds:
            rest(REST_S)
        return not hanging

    def _steps_of(self, cloud: CloudRegion) -> Mapping[str, Step]:
        is_ready = cloud.state == CloudRegionState.READY
        return self._steps[cloud.region.provider] if is_ready else UNREAD_STEPS

    def wait(self) -> None:
        """Blocks until all started rounds have ended."""
        for thread, _ in self._rounds.values():
            thread.join()

    def _start_round(self, cloud: CloudRegion, due: list[str]) -> None:
        # A daemon: a hanging call must not delay the exit of the process.
        thread = threading.Thread(target=self._run_round, args=(cloud, due), name=f"cloud {cloud.pk}", daemon=True)
        self._rounds[cloud.pk] = (thread, self._now_s())
        thread.start()

    def _run_round(self, cloud: CloudRegion, due: list[str]) -> None:
        try:
            for name in due:
                now = clock.now()
                if lease_take(name=f"cloud:{cloud.pk}", holder=this_process(), ttl_s=LEASE_S, now=now) is None:
                    return
                self._due_s[cloud.pk, name] = self._now_s() + self._steps_of(cloud)[name].every_s
                self._run_step(name, cloud, now)
        finally:
            connection.close()

    def _run_step(self, name: str, cloud: CloudRegion, now: datetime) -> None:
        try:
            self._steps_of(cloud)[name].run(cloud, now)
        except Exception:
            log.exception("step %s in region %s failed; it runs again at its next time", name, cloud.pk)


def this_process() -> str:
    return this_holder().rpartition(":")[0]


RECONCILER = "fleet.reconcile"


def cloud_metrics_send(now: datetime) -> str:
    """Sends the current figures in one call without retries, because the next follow in a minute. Blocks for up to 23
    s. Installs without an AWS region and read-only ones send nothing: a copied database would silence the original's
    alarm. Returns why nothing was sent, or ""."""
    home = _alarm_region()
    if home is None:
        return "no region of aws is ready"
    install = Install.objects.first()
    if install is None or install.read_only:
        return _log_reason(f"this install holds no cloud: {install.read_only if install else 'it has no name yet'}")
    try:
        calls.call("cloudwatch", "PutMetricData", home, **metrics_request(install.pk, figures()))
    except calls.CallFailed as error:
        return _log_reason(f"CloudWatch in {home} accepted none: {error}")
    return ""


def figures() -> InstallFigures:
    standing = control_standing()
    return InstallFigures(
        cells_wanted=DeploymentRegion.objects.aggregate(wanted=Sum("cells"))["wanted"] or 0,
        cells_ready=Cell.objects.filter(state=CellState.READY.value).count(),
        incidents_open=Incident.objects.filter(state=IncidentState.OPEN.value, shadow=False).count(),
        reconciled_s=next((loop.age_s for loop in standing.loops if loop.loop == RECONCILER), None),
        last_pass_s=standing.last_pass_s,
    )


def _alarm_region() -> str | None:
    """AWS region of the install's alarm, from the first region's stack."""
    ready = CloudRegion.objects.filter(region__provider="aws", state=CloudRegionState.READY.value)
    first = ready.order_by("region__position", "pk").first()
    return (first.stated_base().home or first.aws_region) if first is not None else None


def _log_reason(reason: str) -> str:
    log.warning("no metrics were sent: %s", reason)
    return reason
