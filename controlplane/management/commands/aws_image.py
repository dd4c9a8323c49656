"""`manage.py aws_image`: moves of machines of AWS from one image to another."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from audit.actors import command_actor
from audit.commands import AuditedCommand
from fleet.models import CloudRegion, ImageMove
from fleet.planning.states import CloudRegionState
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.install import install_ensure
from fleet.providers.aws.stack import StackRefused, region_read
from fleet.services.cloud_images import image_back, image_move
from kernel import clock
from kernel.refusals import Refusal

SHOWN = 20


class Command(AuditedCommand):
    help = (
        "Move the machines of an instance type in a region to another image: one unit first, then a spare or a cell at "
        "a time, and back if two launches do not boot. Without arguments it prints how moves stand."
    )
    one_transaction = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--region", default="")
        parser.add_argument("--type", default="", help="of instances, such as trn1.32xlarge")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--image", default="", metavar="AMI", help="its id in that region")
        what.add_argument("--from-stack", action="store_true", help="the image that the region's stack states now")
        what.add_argument("--back", action="store_true", help="turn the move that is under way round")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["image"] or options["from_stack"] or options["back"]:
            self._begin(options)
        moves = ImageMove.objects.filter(region_id=options["region"]) if options["region"] else ImageMove.objects.all()
        for move in moves[:SHOWN]:
            self.stdout.write(f"{move}: {move.state}, {move.reason or 'begins'}")

    def _begin(self, options: dict[str, Any]) -> None:
        name, kind, now = options["region"], options["type"], clock.now()
        cloud = CloudRegion.objects.filter(pk=name, state=CloudRegionState.READY).first()
        if cloud is None:
            raise CommandError(f"there is no region {name!r} of provider aws that is ready: say which by --region")
        try:
            if options["back"]:
                image_back(cloud, kind, actor=command_actor().name, now=now)
                return
            image = options["image"] or _stated(cloud, kind, install_ensure(now).pk)
            image_move(cloud, kind, image, actor=command_actor().name, now=now)
        except (Refusal, CallFailed, StackRefused) as error:
            raise CommandError(str(error)) from error


def _stated(cloud: CloudRegion, kind: str, install: str) -> str:
    """The image of a type by the stack as it is now.

    Raises:
        CommandError: it states none.
    """
    pools = region_read(cloud.aws_region, cloud.stack, install, [kind]).pools
    image = next((pool.image for pool in pools), "")
    if not image:
        raise CommandError(f"stack {cloud.stack} has no pool of {kind!r}: say which type by --type")
    return image
