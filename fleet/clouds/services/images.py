"""Moves the machines of an instance type in a region, or its tasks of ECS, to another image, and back.
`fleet.clouds.planning.upkeep` decides the steps, and machines leave by notices. The web process stores only the
request: only the loop `fleet.cloud` calls the cloud, outside transactions."""

import re
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.db.models import F, QuerySet

from fleet.clouds.aws.actions import LATER
from fleet.clouds.aws.calls import CallFailed, Refused, Unanswered, call
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.region import StackRefused, region_read
from fleet.clouds.ecs.region import cluster_read
from fleet.clouds.models import CapacityPool, CloudNotice, CloudRegion, ImageMove, TaskImage
from fleet.clouds.planning.upkeep import IMAGE_TONE, ImageState, ImageStep, plan_image
from fleet.clouds.selectors import image_machines
from fleet.machines.models import Machine
from fleet.machines.planner import Statement
from fleet.machines.services.reports import notice_record
from fleet.reconcile.planning.states import CloudRegionState, MachineState, NoticeKind, NoticeSource
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from models_registry.instance_types.selectors import instance_shapes

IMAGE = re.compile(r"ami-[0-9a-f]{8,17}")
TASK_IMAGE = re.compile(r"[A-Za-z0-9./_-]{1,200}(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]{1,64})")
"""As of `deploy/aws/ecs.yaml`. A tag must be immutable."""
ACTOR = "fleet.cloud"
ECS = "ecs"
"""The provider whose images are those of tasks."""


@dataclass(frozen=True, slots=True)
class _Found:
    image: str
    root_device: str


def image_move_request(
    region: str, instance_type: str, image: str, *, actor: str, now: datetime, why: str = ""
) -> ImageMove:
    """Stores a request to move a type's machines, or its tasks of ECS, to an image; "": the one in the region's stack.
    The loop `fleet.cloud` checks the image and starts the move. Raises InvalidInput if it is no image, the cloud region
    is not ready, or nodes of the type were never launched there. Raises Conflict if a move is under way, or all
    launches use the image already."""
    with transaction.atomic():
        clouds = CloudRegion.objects.select_for_update(of=("self",)).filter(state=CloudRegionState.READY)
        cloud = clouds.filter(pk=region).select_related("region").first()
        if cloud is None:
            message = f"there is no region {region!r} of provider aws or ecs that is ready"
            raise InvalidInput(field="region", rule="cloud", message=message)
        if image and not (TASK_IMAGE if _has_tasks(cloud) else IMAGE).fullmatch(image):
            raise InvalidInput(field="image", rule="image", message=_not_an_image(cloud, image))
        pools = _images_of_type(cloud, instance_type)
        if not pools.exclude(instance_type__accelerator="none").exists():
            missing = "no task for nodes was started on" if _has_tasks(cloud) else "it has no pool for nodes of"
            message = f"region {region}: {missing} {instance_type!r}"
            raise InvalidInput(field="instance_type", rule="pool", message=message)
        under_way = ImageMove.objects.filter(region_id=region, instance_type_id=instance_type, ended_at=None).first()
        if under_way is not None:
            raise Conflict(f"{under_way} is under way ({under_way.state}); roll it back, or wait for its end")
        if image and not pools.exclude(image=image).exists():
            raise Conflict(f"launches of {instance_type} in {region} use {image} already")
        move = ImageMove.objects.create(
            region_id=region, instance_type_id=instance_type, image=image, asked_by=actor, asked_at=now
        )
        _move_event(move, f"{move} was requested by {actor}" + (f": {why}" if why else ""), actor, now)
        wake_ups.send("fleet.cloud")
    return move


def image_move_roll_back(move_id: int, *, actor: str, now: datetime, why: str = "") -> ImageMove:
    """Rolls a move back: machines on the new image are replaced. A move that has not begun is cancelled. Raises
    Conflict if it is over, or already going back."""
    with transaction.atomic():
        move = ImageMove.objects.select_for_update().get(pk=move_id)
        if move.ended_at is not None or move.state == ImageState.BACK:
            raise Conflict(f"{move} is {move.state}: only a move that is under way can be rolled back")
        reason = f"requested by {actor}" + (f": {why}" if why else "")
        if move.state == ImageState.ASKED:
            _refuse_move(move, f"cancelled before it began, {reason}", actor, now)
        else:
            _set_move_state(move, ImageState.BACK, reason, actor, now)
            move.save()
    return move


def cloud_images(cloud: CloudRegion, now: datetime) -> None:
    """Takes the next step of each move in a region. Asks the cloud for the images of new moves."""
    for move in ImageMove.objects.filter(region_id=cloud.pk, state=ImageState.ASKED).order_by("pk"):
        _confirm_image(cloud, move, now)
    moves = ImageMove.objects.filter(region_id=cloud.pk, ended_at=None).exclude(state=ImageState.ASKED)
    for pk in moves.values_list("pk", flat=True):
        with transaction.atomic():
            move = ImageMove.objects.select_for_update().get(pk=pk)
            if move.ended_at is None:
                step = plan_image(ImageState(move.state), image_machines(move), move.booted, move.failed, now)
                _apply_image_step(move, step, now)


def _confirm_image(cloud: CloudRegion, asked: ImageMove, now: datetime) -> None:
    """Starts the canary once the cloud confirms the image."""
    found, refusal, waits = None, "", ""
    try:
        found = _find_image(cloud, asked, now)
    except CallFailed as error:
        if isinstance(error, Unanswered) or error.code in LATER:
            waits = f"no answer yet: {error}"
        else:
            refusal = str(error)
    except (InvalidInput, StackRefused) as error:
        refusal = str(error)
    with transaction.atomic():
        row = CloudRegion.objects.select_for_update(of=("self",)).select_related("region").get(pk=cloud.pk)
        move = ImageMove.objects.select_for_update().get(pk=asked.pk)
        if move.state != ImageState.ASKED:
            return
        if found is not None:
            _start_canary(row, move, found, now)
        elif refusal:
            _refuse_move(move, refusal, ACTOR, now)
        elif move.reason != waits:
            move.reason = waits
            move.save(update_fields=["reason"])
            live.push("regions", move.region_id)


def _has_tasks(cloud: CloudRegion) -> bool:
    return bool(cloud.region.provider == ECS)


def _not_an_image(cloud: CloudRegion, image: str) -> str:
    if _has_tasks(cloud):
        return f"{image[:80]!r} is not a reference to an image with a digest or a tag, such as registry/node-agent:1.1"
    return f"{image[:80]!r} is not the ID of an image, such as ami-0123456789abcdef0"


def _find_image(cloud: CloudRegion, move: ImageMove, now: datetime) -> _Found:
    image = move.image
    if _has_tasks(cloud) and image:
        return _Found(image, "")  # whether a registry has it, the first unit shows
    if _has_tasks(cloud):
        stated = cluster_read(cloud.aws_region, cloud.stack, install_ensure(now).pk).base.cluster
        return _Found(stated.image if stated else "", "")
    if not image:
        kind = move.instance_type_id
        types = instance_shapes([kind])
        pools = region_read(cloud.aws_region, cloud.stack, install_ensure(now).pk, types).pools
        image = next((pool.image for pool in pools), "")
        if not image:
            message = f"stack {cloud.stack} has no pool of {kind}"
            raise InvalidInput(field="image", rule="image", message=message)
    return _Found(image, _root_device(cloud, image))


def _start_canary(row: CloudRegion, move: ImageMove, found: _Found, now: datetime) -> None:
    """From now on launches use it (`fleet.clouds.planning.upkeep.takes_new`)."""
    pools = _images_of_type(row, move.instance_type_id)
    move.image = found.image
    if not pools.exclude(image=found.image).exists():
        _refuse_move(move, f"launches of {move.instance_type_id} in {row.pk} use {found.image} already", ACTOR, now)
        return
    if found.root_device:
        row.base = {**row.base, "root_devices": {**row.base.get("root_devices", {}), found.image: found.root_device}}
        row.save(update_fields=["base"])
    pools.update(next_image=found.image)
    _set_move_state(move, ImageState.CANARY, "one unit is tried first", ACTOR, now)
    move.save()


def _refuse_move(move: ImageMove, reason: str, actor: str, now: datetime) -> None:
    move.ended_at = now
    _set_move_state(move, ImageState.REFUSED, reason, actor, now)
    move.save()


def _images_of_type(cloud: CloudRegion, instance_type: str) -> QuerySet[CapacityPool] | QuerySet[TaskImage]:
    """Rows with the image in use and the next one."""
    if _has_tasks(cloud):
        return TaskImage.objects.filter(region_id=cloud.pk, instance_type_id=instance_type)
    return CapacityPool.objects.filter(region_id=cloud.pk, instance_type_id=instance_type)


def _apply_image_step(move: ImageMove, step: ImageStep, now: datetime) -> None:
    was = (move.state, move.reason, move.booted, move.failed)
    move.booted, move.failed = sorted(step.booted), sorted(step.failed)
    if step.state is ImageState.DONE:
        _finish_move(move, now)
    if step.state != move.state:
        _set_move_state(move, step.state, step.reason, ACTOR, now)
    move.reason = step.reason
    if (move.state, move.reason, move.booted, move.failed) != was:
        move.save()
        live.push("regions", move.region_id)
    here = Machine.objects.filter(region_id=move.region_id, runs__in=step.leave).exclude(state=MachineState.GONE)
    target = f"back from {move.image}" if move.state == ImageState.BACK else f"to {move.image}"
    for machine in here:
        _announce_machine(
            machine, Statement(f"{move.pk}/{move.state}", now), now, f"{move.instance_type_id} moves {target}"
        )


def _announce_machine(machine: Machine, statement: Statement, now: datetime, text: str = "") -> None:
    notice_record(
        machine=machine, kind=NoticeKind.IMAGE, source=NoticeSource.IMAGE, statement=statement, text=text, now=now
    )


def _set_move_state(move: ImageMove, state: ImageState, reason: str, actor: str, now: datetime) -> None:
    """Changes the state; machines that were announced to leave stay."""
    if state in (ImageState.BACK, ImageState.DONE):
        announced = CloudNotice.objects.filter(
            kind=NoticeKind.IMAGE, settled_at=None, machine__region_id=move.region_id
        )
        announced = announced.filter(machine__instance_type_id=move.instance_type_id).select_related("machine")
        for notice in announced:
            _announce_machine(notice.machine, Statement("", now, over=True), now)
    move.state, move.reason = state.value, reason
    _move_event(move, f"{move} is {state}: {reason}", actor, now)


def _finish_move(move: ImageMove, now: datetime) -> None:
    cloud = CloudRegion.objects.select_related("region").get(pk=move.region_id)
    pools = _images_of_type(cloud, move.instance_type_id).filter(next_image=move.image)
    if move.state != ImageState.BACK:
        pools.update(image=F("next_image"))
    pools.update(next_image="")
    move.ended_at = now


def _root_device(cloud: CloudRegion, image: str) -> str:
    try:
        found = call("ec2", "DescribeImages", cloud.aws_region, ImageIds=[image])["Images"]
    except Refused as error:
        if not error.code.startswith("InvalidAMIID"):
            raise
        found = []
    if not found:
        message = f"{cloud.aws_region} has no image {image} that this account may use"
        raise InvalidInput(field="image", rule="image", message=message)
    return str(found[0]["RootDeviceName"])


def _move_event(move: ImageMove, message: str, actor: str, now: datetime) -> None:
    state = ImageState(move.state)
    tone, detail = IMAGE_TONE[state], {"move": move.pk, "instance_type": move.instance_type_id, "image": move.image}
    event_record(
        kind=f"image.{state}", message=message, tone=tone, now=now, actor=actor, region=move.region_id, detail=detail
    )
    live.push("regions", move.region_id)
