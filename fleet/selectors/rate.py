"""What operators state of machines and power, as planners take it."""

from datetime import datetime

from fleet.models import Rate
from fleet.planning.rate import Rates


def rates_at(now: datetime) -> Rates:
    """The rates in force, in one query."""
    return Rates((row.rate() for row in Rate.objects.filter(valid_from__lte=now)), now)
