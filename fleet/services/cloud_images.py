"""Moves the machines of an instance type in a region to another image, and back: a step of `cloud_upkeep`. What comes
next is decided by `fleet.planning.images`; machines leave by notices, as if their provider had announced it."""

import re
from datetime import datetime

from django.db import transaction
from django.db.models import F

from fleet.models import CapacityPool, CloudNotice, CloudRegion, ImageMove, Machine
from fleet.planning.images import ImageState, ImageStep, plan_image
from fleet.planning.notice_evidence import Said
from fleet.planning.states import MachineState, NoticeKind, NoticeSource
from fleet.providers.aws.calls import Refused, call
from fleet.selectors.images import image_machines
from fleet.services.machine_notice import notice_record
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

IMAGE = re.compile(r"ami-[0-9a-f]{8,17}")
ACTOR = "fleet.cloud"
_TONES = {ImageState.BACK: Tone.BAD, ImageState.DONE: Tone.OK}


def image_move(cloud: CloudRegion, instance_type: str, image: str, *, actor: str, now: datetime) -> ImageMove:
    """Begin to move a type's machines to an image. Asks EC2 for the image: not for web.

    Raises:
        InvalidInput: there is no such image there, or no pool of the type for nodes.
        Conflict: a move is under way, or all pools have the image already.
        CallFailed: EC2 did not say.
    """
    device = _root_device(cloud, image)
    with transaction.atomic():
        row = CloudRegion.objects.select_for_update().get(pk=cloud.pk)
        pools = CapacityPool.objects.filter(region_id=row.pk, instance_type_id=instance_type)
        if not pools.exclude(instance_type__accelerator="none").exists():
            message = f"region {row.pk} has no pool of {instance_type!r} for nodes"
            raise InvalidInput(field="instance_type", rule="pool", message=message)
        under_way = ImageMove.objects.filter(region_id=row.pk, instance_type_id=instance_type, ended_at=None).first()
        if under_way is not None:
            raise Conflict(f"{under_way} is under way ({under_way.state}); turn it back, or wait for its end")
        if not pools.exclude(image=image).exists():
            raise Conflict(f"all pools of {instance_type} in {row.pk} have {image} already")
        row.base = {**row.base, "root_devices": {**row.base.get("root_devices", {}), image: device}}
        row.save(update_fields=["base"])
        pools.update(next_image=image)
        move = ImageMove.objects.create(
            region_id=row.pk, instance_type_id=instance_type, image=image, asked_by=actor, asked_at=now
        )
        _event(move, f"{move}: one unit is tried first", actor, now)
    return move


def image_back(cloud: CloudRegion, instance_type: str, *, actor: str, now: datetime) -> ImageMove:
    """Turn a move round: what runs the new image already is replaced by the old one.

    Raises:
        Conflict: none is under way, or it goes back already.
    """
    with transaction.atomic():
        rows = ImageMove.objects.select_for_update().filter(region_id=cloud.pk, instance_type_id=instance_type)
        move = rows.filter(ended_at=None).exclude(state=ImageState.BACK).first()
        if move is None:
            raise Conflict(f"no move of {instance_type} in {cloud.pk} to another image is under way")
        _turn(move, ImageState.BACK, f"asked for by {actor}", actor, now)
        move.save()
    return move


def cloud_images(cloud: CloudRegion, now: datetime) -> None:
    """Take each move of a region one step further. Calls nothing."""
    for pk in ImageMove.objects.filter(region_id=cloud.pk, ended_at=None).values_list("pk", flat=True):
        with transaction.atomic():
            move = ImageMove.objects.select_for_update().get(pk=pk)
            if move.ended_at is None:
                step = plan_image(ImageState(move.state), image_machines(move), move.booted, move.failed, now)
                _take(move, step, now)


def _take(move: ImageMove, step: ImageStep, now: datetime) -> None:
    move.booted, move.failed = sorted(step.booted), sorted(step.failed)
    if step.state is ImageState.DONE:
        _end(move, now)
    if step.state != move.state:
        _turn(move, step.state, step.reason, ACTOR, now)
    move.reason = step.reason
    move.save()
    here = Machine.objects.filter(region_id=move.region_id, runs__in=step.leave).exclude(state=MachineState.GONE)
    target = f"back from {move.image}" if move.state == ImageState.BACK else f"to {move.image}"
    for machine in here:
        _say(machine, Said(f"{move.pk}/{move.state}", now), now, f"{move.instance_type_id} moves {target}")


def _say(machine: Machine, said: Said, now: datetime, text: str = "") -> None:
    notice_record(machine=machine, kind=NoticeKind.IMAGE, source=NoticeSource.IMAGE, said=said, text=text, now=now)


def _turn(move: ImageMove, state: ImageState, reason: str, actor: str, now: datetime) -> None:
    """Another state: what was told to leave for the one before stays after all."""
    if state in (ImageState.BACK, ImageState.DONE):
        told = CloudNotice.objects.filter(kind=NoticeKind.IMAGE, settled_at=None, machine__region_id=move.region_id)
        told = told.filter(machine__instance_type_id=move.instance_type_id).select_related("machine")
        for notice in told:
            _say(notice.machine, Said("", now, over=True), now)
    move.state, move.reason = state.value, reason
    _event(move, f"{move} is {state}: {reason}", actor, now)


def _end(move: ImageMove, now: datetime) -> None:
    """Pools have one image again: the new one, or the old one if it went back."""
    pools = CapacityPool.objects.filter(
        region_id=move.region_id, instance_type_id=move.instance_type_id, next_image=move.image
    )
    if move.state != ImageState.BACK:
        pools.update(image=F("next_image"))
    pools.update(next_image="")
    move.ended_at = now


def _root_device(cloud: CloudRegion, image: str) -> str:
    if not IMAGE.fullmatch(image):
        message = f"{image!r} is no id of an image, such as ami-0123456789abcdef0"
        raise InvalidInput(field="image", rule="image", message=message)
    try:
        found = call("ec2", "DescribeImages", cloud.aws_region, ImageIds=[image])["Images"]
    except Refused as error:
        if not error.code.startswith("InvalidAMIID"):
            raise
        found = []
    if not found:
        message = f"{cloud.aws_region} has no image {image}, or not for this account"
        raise InvalidInput(field="image", rule="image", message=message)
    return str(found[0]["RootDeviceName"])


def _event(move: ImageMove, message: str, actor: str, now: datetime) -> None:
    tone = _TONES.get(ImageState(move.state), Tone.MOVING)
    event_record(
        kind=f"image.{move.state}", message=message, tone=tone, now=now, actor=actor, region=move.region_id, detail={}
    )
