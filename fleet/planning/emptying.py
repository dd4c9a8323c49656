"""What empties a region of a deployment, whichever way it is requested. Pure."""

from collections.abc import Mapping

EMPTIED_BELOW = 0.1
"""A region that keeps less than a tenth, of its cells or of its own requests, is empty for those who would not have it
emptied."""


def empties_origin(shares: Mapping[str, float], origin: str) -> bool:
    """Whether a region keeps next to none of its own requests."""
    return shares.get(origin, 0.0) < EMPTIED_BELOW


def emptied_regions(before: Mapping[str, int], cells: Mapping[str, int]) -> tuple[str, ...]:
    """Those of `cells`, the new numbers, that keep next to none of the cells that they should have had `before`."""
    return tuple(sorted(region for region, count in cells.items() if count < EMPTIED_BELOW * before.get(region, 0)))
