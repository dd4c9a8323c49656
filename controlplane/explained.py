"""The control loops whose rounds are recorded, and explanations of the present: the reconciler's view of an object, the
latest check of the autoscaler, and the region shares in force. For the API and the page; reads only."""

from datetime import datetime

from fleet.autoscaling.models import ScalingState
from fleet.autoscaling.planning.recording import AUTOSCALER
from fleet.recorder.planning.explanations import RECONCILER
from fleet.recorder.planning.reasons import Subject
from fleet.recorder.selectors import present
from kernel.ages import age_text
from traffic.region_shares.models import TrafficMatrix
from traffic.region_shares.planning.recording import AUTOPILOT, share_text
from traffic.routing.planning.recording import PUBLICATION

LOOPS = {loop.name: loop for loop in (RECONCILER, AUTOSCALER, AUTOPILOT, PUBLICATION)}
"""By name. The first one's settings have no prefix in a replay."""
EXPLAINED = (Subject.CELL, Subject.NODE, Subject.DEPLOYMENT, Subject.ROLLOUT, Subject.SHARE)
"""Kinds that can be asked about."""
PLACES_MOST = 20


def explained(kind: Subject, name: str, now: datetime) -> list[str]:
    """Sentences, the most important first; empty if there is no such object. Loads the whole fleet, except for
    shares."""
    if kind is Subject.SHARE:
        return _shares(name)
    sentences = present(now).of(kind, name)
    return [*sentences, *_sizes(name, now)] if sentences and kind is Subject.DEPLOYMENT else sentences


def _sizes(deployment: str, now: datetime) -> list[str]:
    """The latest check of each of its places with a range, which also says why nothing changes."""
    states = ScalingState.objects.filter(place__deployment=deployment).select_related("place")
    return [_size(state, now) for state in states.order_by("place__region")[:PLACES_MOST]]


def _size(state: ScalingState, now: datetime) -> str:
    age = age_text((now - state.looked_at).total_seconds())
    shadow = "" if state.acting else ", in shadow mode or paused"
    wants = f"The autoscaler wants {_cells(state.wanted)} in {state.place.region_id} ({state.rule}{shadow})"
    return f"{wants}, checked {age} ago: {state.reason}."


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _shares(name: str) -> list[str]:
    """Of a deployment, or of `DEPLOYMENT@REGION`."""
    deployment, _, region = name.partition("@")
    matrix = TrafficMatrix.objects.filter(deployment=deployment).first()
    if matrix is None or (region and region not in matrix.shares):
        return []
    origins = [region] if region else sorted(matrix.shares)
    sentences = [f"Requests from {one} go to {share_text(matrix.shares[one])}." for one in origins]
    if matrix.held:
        sentences.append(f"The shares have been kept since {matrix.held_since:%Y-%m-%d %H:%M:%S}: {matrix.held}.")
    return sentences
