"""A control plane of two hosts, as its first host and its second one keep it."""

from dataclasses import replace

from controlplane.embedded.host_authority import make_authority, make_certificate
from controlplane.embedded.membership import NAMES, ControlHost, Membership, Passwords


def membership_pair(addresses: tuple[str, str] = ("10.0.0.1", "10.0.0.2")) -> tuple[Membership, Membership]:
    """What each of the two knows; the second one has not joined yet."""
    authority, authority_key = make_authority()
    hosts = tuple(
        ControlHost(name, address, 5432, f"https://{address}:8443", joined=name == NAMES[0])
        for name, address in zip(NAMES, addresses, strict=True)
    )
    (first, first_key), (second, second_key) = (
        make_certificate(authority, authority_key, host.name, host.address) for host in hosts
    )
    own = Membership(
        own_name=NAMES[0],
        hosts=hosts,
        passwords=Passwords("owner's", "application's", "replication's"),
        authority=authority,
        certificate=first,
        key=first_key,
        shared={"SWITCHYARD_URL": "https://switchyard.example"},
    )
    return own, replace(own, own_name=NAMES[1], certificate=second, key=second_key)
