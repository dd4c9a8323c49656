"""Says what would happen if a key were revoked, or keys required, before somebody asks for it. Pure."""

from datetime import datetime

USUAL_LAG_S = 5
"""What is promised while ingresses are connected; `key.refused` events say what it was."""


def revoking_effect(*, ingresses: int, requests_24h: int, last_used_at: datetime | None) -> str:
    """One or two sentences."""
    gates = "1 ingress" if ingresses == 1 else f"{ingresses} ingresses"
    who = f"by {gates}, within about {USUAL_LAG_S} s" if ingresses else "as soon as an ingress serves"
    if last_used_at is None:
        used = "It has not been used yet."
    else:
        used = f"It made {requests_24h} requests in the last 24 h, the last one at {last_used_at:%Y-%m-%d %H:%M} UTC."
    return f"Requests with this key are refused with 401 {who}. {used}"


def requiring_effect(*, required: bool, active_keys: int) -> str:
    """One sentence for the other position of the switch."""
    if required:
        return "Requests without a key are served again, as nobody's tenant and without limits."
    keys = "1 key" if active_keys == 1 else f"{active_keys} keys"
    nobody = "" if active_keys else ": nobody would be served"
    return f"Requests without a key are refused with 401; {keys} would open the fleet{nobody}."
