"""What users and programs may be called. Pure.

Names are ASCII, because two that look the same must be the same; no longer than every column that names who did
something, because two that are cut to the same must not be; and none that the fleet itself acts under.
"""

import re

LONGEST = 64
"""Of every column that names an actor."""
FORM = re.compile(rf"[A-Za-z0-9][-A-Za-z0-9_.@+]{{0,{LONGEST - 1}}}")
RULE = f"1 to {LONGEST} letters, digits and -_.@+ of ASCII, the first a letter or digit"
RESERVED = frozenset({"anonymous", "autopilot", "reconciler", "root", "switchyard", "system"})
"""What timelines and audit records call the fleet itself, the host's owner and those who are not known."""


def name_refusal(name: str) -> str:
    """Why nobody may be called this; "" if somebody may."""
    if FORM.fullmatch(name) is None:
        return f"{name!r} cannot be a user name here: {RULE}"
    if name.casefold() in RESERVED:
        return f"{name!r} is reserved: records would take what this user does for the fleet's own work"
    return ""
