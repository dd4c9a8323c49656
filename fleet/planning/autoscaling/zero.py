"""What is asked for a place that may have no cells at all: by requests that wait for its first one, by work that is
queued, and by requests that other regions serve for it. And since when nobody asks. Pure.

A first cell is started where somebody would else go without. Requests that another region serves start none, unless the
policy says so or that region has no room for them.
"""

import math
from collections.abc import Iterator
from datetime import datetime, timedelta

from fleet.planning.autoscaling.policy import WakeOn
from fleet.planning.autoscaling.view import PlaceLoad, ScaledPlace, ScalingRule, ScalingView

GAP_S = 60.0
"""A longer time without a look is one of which nothing is known."""


def waiting_asks(place: ScaledPlace, load: PlaceLoad) -> Iterator[tuple[ScalingRule, float, str]]:
    """Rules by which so many requests at once are to have room at least, each with what it says of them."""
    if load.held > 0 and place.ready == 0:
        count = math.ceil(load.held)
        text = f"{count} request{' waits' if count == 1 else 's wait'} for its first cell"
        yield ScalingRule.WAITING, max(load.total, min(load.held, 1.0)), text
    if load.backlog > 0:
        text = f"what is queued of batches and near-real-time requests ({load.backlog_requests:.0f} requests)"
        yield ScalingRule.BACKLOG, load.backlog, f"{text} is done in time by {load.backlog:.1f} at once"


def elsewhere_ask(view: ScalingView, place: ScaledPlace, load: PlaceLoad) -> tuple[ScalingRule, float, str] | None:
    """The same for requests from here that other regions serve while there is no cell here."""
    if place.ready > 0 or load.elsewhere <= 0:
        return None
    text = f"{load.elsewhere:.1f} requests at once of this region are served in others"
    if view.policy.wake is WakeOn.ARRIVALS:
        return ScalingRule.ARRIVALS, load.elsewhere, f"{text}, and its policy starts a cell here"
    if place.region in view.crowded_out:
        return ScalingRule.ARRIVALS, load.elsewhere, f"{text}, which have no room for more"
    return None


def is_idle(view: ScalingView, load: PlaceLoad) -> bool:
    """Whether nobody asks for anything that a cell here is for."""
    asks_here = load.total > 0 or load.held > 0 or load.backlog > 0 or load.arrivals_per_s > 0
    return not asks_here and not (view.policy.wake is WakeOn.ARRIVALS and load.elsewhere > 0)


def idle_since(view: ScalingView, place: ScaledPlace, now: datetime) -> datetime | None:
    """Since when that has been so, as far as it was seen; None: it is not, or nobody knows."""
    if place.load is None or not is_idle(view, place.load):
        return None
    last = place.history[-1].at if place.history else None
    was_seen = last is not None and now - last <= timedelta(seconds=GAP_S)
    return place.idle_since if place.idle_since is not None and was_seen else now


def may_be_empty(view: ScalingView, since: datetime | None, now: datetime) -> bool:
    """Whether it has been idle for as long as its policy says."""
    return since is not None and now - since >= timedelta(seconds=view.policy.idle_s)
