"""What an order would do to each deployment that it concerns, from what is seen now. Changes nothing."""

import sys
from dataclasses import replace
from datetime import datetime

from traffic.models import TrafficOverride
from traffic.planning.effect import Effect, predict
from traffic.selectors.steering import override_view, traffic_views


def effects_of(order: TrafficOverride, now: datetime) -> tuple[Effect, ...]:
    """By name of the deployment. `order` need not be stored; it counts as the youngest."""
    asked = replace(override_view(order), id=sys.maxsize)
    views = traffic_views(now, order.deployment_id or "")
    return tuple(predict(view, asked, now) for _, (_, view) in sorted(views.items()))
