"""Every operation of the REST API and every page, as the routers and URL patterns have them, with a sample path."""

import re
from dataclasses import dataclass

from controlplane.api.urls import router
from controlplane.dashboard.urls import urlpatterns

SAMPLES = ("1", "x", "x@1", "evacuate-region", "slow")
ARGUMENTS = {"int": "999999", "str": "x", "model": "m", "version": "m@1", "path": "x", "slug": "x", "uuid": "x"}


@dataclass(frozen=True, slots=True)
class Operation:
    """`name`: how the tables of permissions call it."""

    name: str
    method: str
    path: str


def operations() -> list[Operation]:
    """What the API's router answers, without its root."""
    found = []
    for prefix, view_set, _ in router.registry:
        for route in router.get_routes(view_set):
            lookup = _lookup(view_set) if route.detail else ""
            path = route.url.format(prefix=prefix, lookup=lookup, trailing_slash="").strip("^$")
            path = path.replace(r"\.", ".")
            shown = route.url.format(prefix=prefix, lookup="{id}", trailing_slash="").strip("^$")
            for method, action in router.get_method_map(view_set, route.mapping).items():
                found.append(Operation(f"{method.upper()} {shown}", method.upper(), f"/api/v1/{path}"))
                assert action
    return found


def _lookup(view_set: type) -> str:
    pattern = getattr(view_set, "lookup_value_regex", "[^/.]+")
    return next(sample for sample in SAMPLES if re.fullmatch(pattern, sample))


def pages() -> list[Operation]:
    """GET and POST of every URL that people open in a browser."""
    return [
        Operation(f"{method} {pattern.name}", method, "/" + _filled(str(pattern.pattern)))
        for pattern in urlpatterns
        for method in ("GET", "POST")
    ]


def _filled(route: str) -> str:
    return re.sub(r"<(?:(\w+):)?\w+>", lambda found: ARGUMENTS[found[1] or "str"], route)
