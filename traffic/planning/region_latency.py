"""How far regions are apart, in milliseconds there and back: as measured and stated, else from where they lie. Pure.

The estimate orders regions; it is not for promises. Light in fibre takes 1 ms for 100 km there and back, and real paths
are about half as long again as the great circle. State what you measured where it matters.
"""

import math
from collections.abc import Iterable, Mapping

MS_PER_KM = 0.015
SAME_CITY_MS = 2.0
UNKNOWN_MS = 80.0
"""Between regions of which one is not on the map: about as far as across a continent."""
EARTH_RADIUS_KM = 6371.0

PLACES = {
    "us-east-1": (38.9, -77.4), "us-east-2": (40.0, -83.0), "us-west-1": (37.4, -121.9), "us-west-2": (45.8, -119.7),
    "ca-central-1": (45.5, -73.6), "ca-west-1": (51.0, -114.1), "mx-central-1": (20.6, -100.4),
    "sa-east-1": (-23.5, -46.6), "eu-west-1": (53.3, -6.3), "eu-west-2": (51.5, -0.1), "eu-west-3": (48.9, 2.3),
    "eu-central-1": (50.1, 8.7), "eu-central-2": (47.4, 8.5), "eu-north-1": (59.3, 18.1), "eu-south-1": (45.5, 9.2),
    "eu-south-2": (41.6, -0.9), "me-south-1": (26.1, 50.6), "me-central-1": (24.5, 54.4), "il-central-1": (32.1, 34.8),
    "af-south-1": (-33.9, 18.4), "ap-south-1": (19.1, 72.9), "ap-south-2": (17.4, 78.5), "ap-east-1": (22.3, 114.2),
    "ap-southeast-1": (1.35, 103.8), "ap-southeast-2": (-33.9, 151.2), "ap-southeast-3": (-6.2, 106.8),
    "ap-southeast-4": (-37.8, 145.0), "ap-northeast-1": (35.7, 139.7), "ap-northeast-2": (37.6, 127.0),
    "ap-northeast-3": (34.7, 135.5),
}  # fmt: skip
"""Region -> degrees north and east of the city or county that AWS names it after."""


def latencies_ms(regions: Iterable[str], stated: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """(from, to) -> milliseconds there and back. `stated` maps `from:to` or `to:from` to what was measured."""
    names = sorted(regions)
    return {(a, b): _latency_ms(a, b, stated) for a in names for b in names}


def _latency_ms(a: str, b: str, stated: Mapping[str, float]) -> float:
    if a == b:
        return 0.0
    for key in (f"{a}:{b}", f"{b}:{a}"):
        if key in stated:
            return stated[key]
    if a not in PLACES or b not in PLACES:
        return UNKNOWN_MS
    return round(SAME_CITY_MS + MS_PER_KM * _distance_km(PLACES[a], PLACES[b]), 1)


def _distance_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Along the great circle, by the haversine formula."""
    north_a, east_a, north_b, east_b = (math.radians(degrees) for degrees in (*a, *b))
    half = math.sin((north_b - north_a) / 2) ** 2
    half += math.cos(north_a) * math.cos(north_b) * math.sin((east_b - east_a) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(half))
