"""Which network interface has an address, asked of the kernel. IPv4 only, as gloo and NCCL take names of interfaces."""

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915
"""From <linux/sockios.h>."""
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)
"""Of an IPv4 address in struct ifreq."""


def interface_of(address: str) -> str | None:
    """Name of the interface whose first address this is; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(asking, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_ADDRESS]) == address:
                    return name
    return None
