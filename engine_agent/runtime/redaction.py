"""Takes out of lines of logs what looks like a secret, before they leave the node. Pure.

It knows forms, not meanings: what an engine writes in a form of its own is not recognised, so secrets belong into no
log in the first place.
"""

import re
from collections.abc import Iterable

REDACTED = "[taken out]"
SHORTEST_SECRET = 8
"""A shorter text says little and stands in many harmless places."""

_NAMED = re.compile(
    r"""(?ix)
    (?P<name> [\w-]* (?: secret | password | passwd | token | api[_-]?key | access[_-]?key | credential ) [\w-]*
        ["']? \s* [=:] \s* ["']?)
    (?P<value> (?!\d{1,9}\b) [^\s"',;&}]{4,})
    """
)
"""`password=…`, `"api_key": "…"`; plain numbers are left: `max_tokens=128` is no secret."""
_FORMS = re.compile(
    r"""(?x)
    (?: sw_[0-9a-f]{4,}_[\w-]{8,} | sk-[\w-]{8,} | hf_[A-Za-z0-9]{8,} | gh[pousr]_[A-Za-z0-9]{16,}
      | (?:AKIA|ASIA)[A-Z0-9]{16} | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]* )
    """
)
"""Credentials of ours, OpenAI's, Hugging Face's, GitHub's and AWS's keys, JSON web tokens."""
_HEADER = re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+|\bbearer\s+)[\w.~+/=-]{4,}")
_USER_INFO = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://)[^\s/@:]*:[^\s/@]+@")


def redacted(line: str, secrets: Iterable[str] = ()) -> str:
    """The line without credentials by their form, and without each of `secrets`, which the caller knows."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            line = line.replace(secret, REDACTED)
    line = _HEADER.sub(rf"\1{REDACTED}", line)
    line = _USER_INFO.sub(rf"\1{REDACTED}@", line)
    line = _FORMS.sub(REDACTED, line)
    return _NAMED.sub(rf"\g<name>{REDACTED}", line)
