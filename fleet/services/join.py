"""The line that joins a host: where the control plane is for hosts, and by which key they know it."""

import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

from django.conf import settings

from fleet.selectors.trust import server_pin
from kernel import clock


class JoinLine(NamedTuple):
    """`text` is what to run; `notices`: what may keep hosts from using it, a sentence each."""

    text: str
    notices: tuple[str, ...]


def join_line(token: str) -> JoinLine:
    """What to run on a host. curl checks the pinned key also where it does not know who signed the certificate."""
    url, pin = settings.AGENT_URLS[0], server_pin(clock.now())
    trust = f"-fsSLk --pinnedpubkey '{pin}'" if pin else "-fsSL"
    return JoinLine(f"curl {trust} {url}/join | sh -s -- {token}", tuple(_notices(url)))


def _notices(url: str) -> list[str]:
    host = urlsplit(url).hostname or ""
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if not is_own:
        return []
    return [f"{url} is an address of this computer alone; set SWITCHYARD_AGENT_URL to one that the hosts reach."]
