"""What a region in a cloud has that no launch makes: its network, roles and addresses, as its stack states them. Pure.

It is stored as it is (`CloudRegion.base`), and read by `msgspec`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ZoneBase:
    """`zone_id` is the same in all accounts; a zone's name is not."""

    subnet: str
    zone_id: str


@dataclass(frozen=True, slots=True)
class CloudBase:
    """`zones` by name. Groups are security groups, that of nodes lets everything through from and to itself. Profiles
    are ARNs of instance profiles, roles the names of what they hold: a machine proves itself by its role. Empty where
    the stack has no such thing. `root_devices`: what an image calls its root volume, `root_device` that of all others.

    `load_balancer` and `load_balancer_zone`: the DNS name of the region's entry and the hosted zone that it lies in,
    which an alias names; `target_groups`: ARNs of those of its ingresses, `tls` or `plain`. `hosted_zone` and
    `entry_name`: where the weighted records of all regions are. `home`: the region of AWS of the install's base,
    where its alarm hears; empty for the region's own.
    """

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

    def root_device_of(self, image: str) -> str:
        """What an image calls its root volume."""
        return self.root_devices.get(image, self.root_device)
