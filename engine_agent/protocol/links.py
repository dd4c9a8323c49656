"""How parts of a fleet on different hosts talk to each other: by TLS, each with a certificate of the fleet, and each
checking the other's name. One variable makes all of it plain, to measure what it costs."""

from collections.abc import Mapping

PLAIN_LINKS_VARIABLE = "SWITCHYARD_PLAIN_LINKS"


def links_are_plain(environment: Mapping[str, str]) -> bool:
    """Whether this process is told to do without TLS.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    stated = environment.get(PLAIN_LINKS_VARIABLE) or "0"
    if stated not in {"0", "1"}:
        raise ValueError(f"{PLAIN_LINKS_VARIABLE} is {stated!r}; it must be 1 for links without TLS, or 0")
    return stated == "1"
