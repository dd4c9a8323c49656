"""Keeps what somebody who sends requests to cells sees of them, as a second witness beside their agents."""

from datetime import datetime

from fleet.models import CellSighting


def sighting_store(*, witness: str, down: dict[str, int], now: datetime) -> None:
    """Which cells `witness` cannot reach, by generation. Its latest word counts, and only while it is fresh."""
    if down:
        CellSighting.objects.update_or_create(witness=witness, defaults={"seen_at": now, "down": down})
    else:
        CellSighting.objects.filter(witness=witness).exclude(down={}).update(seen_at=now, down={})
