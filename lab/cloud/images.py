"""Public images and the parameters that name the latest of each. moto knows those of Amazon Linux, and no DLAMI."""

from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models.amis import Ami
from moto.ssm.models import Parameter

from lab.cloud.world import World

IMAGES = {
    "/aws/service/neuron/dlami/multi-framework/ubuntu-22.04/latest/image_id": ("ami-0000000000000aaaa", "/dev/sda1"),
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id": (
        "ami-0000000000000bbbb",
        "/dev/sda1",
    ),
    "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64": ("ami-0000000000000cccc", "/dev/xvda"),
}
"""Parameter -> image, and what that calls its root volume."""


def publish_images(world: World, region: str) -> None:
    """Make them known in a region; again is nothing."""
    ec2, ssm = world.backend("ec2", region), world.backend("ssm", region)
    ssm._parameters.latest_amis_loaded = True  # or moto would add its own, of images that it does not have
    for name, (image, device) in IMAGES.items():
        ec2.amis[image] = Ami(ec2, image, name=name, public=True, root_device_name=device, architecture="x86_64")
        ssm._parameters[name] = [_parameter(world, name, image)]


def _parameter(world: World, name: str, value: str) -> Any:
    made: Any = Parameter  # whose base, to mypy, is abstract
    return made(
        account_id=world.account, name=name, value=value, parameter_type="String", description=None,
        allowed_pattern=None, keyid=None, last_modified_date=utcnow(), version=1, data_type="aws:ec2:image",
    )  # fmt: skip
