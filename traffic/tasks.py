"""Celery tasks of traffic: control loops and housekeeping. Each calls services and decides nothing."""

import logging
from collections.abc import Callable
from functools import partial

from celery import shared_task, signals
from django.conf import settings

from fleet.autoscaling.planning.recording import AUTOSCALER
from fleet.recorder.services import Recorder
from kernel import clock, wake_ups
from kernel.control_loops import ControlLoop, rest_loop
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services.body_groups import body_groups_trim
from traffic.async_requests.services.queues import refused_messages_trim
from traffic.async_requests.services.requests import async_requests_expire, async_requests_trim
from traffic.batch_schedules.services.runs import schedules_run
from traffic.batch_sinks.planner import SinkSettings
from traffic.batch_sinks.services.request_groups import request_groups_trim
from traffic.batches.services.batch import batches_trim
from traffic.capacity.services import Planner, autoscaling_run, roles_plan
from traffic.demand.services import DemandMeter, demand_trim, forecasts_trim
from traffic.entry.services import entry_run, entry_targets_follow
from traffic.files.services.files import file_garbage_collect, stored_files_trim
from traffic.keys.services import keys_retire, revocations_confirm
from traffic.region_shares.planning.recording import AUTOPILOT
from traffic.region_shares.services.autopilot import autopilot_run
from traffic.responses.services import responses_trim
from traffic.routing.planning.recording import PUBLICATION
from traffic.routing.selectors import RoutingCache
from traffic.routing.services.ingresses import cloud_ingresses_ensure, ingresses_ensure
from traffic.routing.services.tables import drained_cells_mark, tables_publish
from traffic.streams.services import streams_trim
from traffic.usage.services.budgets import budgets_follow
from traffic.usage.services.counting import LeaderRows, usage_count, usage_trim
from traffic.usage.services.export import usage_export_days
from traffic.usage.services.token_fit import token_fit_all

log = logging.getLogger(__name__)
_routing = RoutingCache()
RECORDED = (PUBLICATION, AUTOPILOT, AUTOSCALER)
_recorders = {loop: Recorder(loop) for loop in RECORDED}
_meter = DemandMeter()
_planner = Planner()
_leader_rows = LeaderRows()


@shared_task(name="traffic.publish", base=ControlLoop)
def publish() -> bool:
    """Several controllers may run this at the same time; each revision is published once."""
    if _routing.is_at_rest():
        return True
    published = tables_publish(now=clock.now(), cache=_routing, recorder=_recorders[PUBLICATION])
    drained_cells_mark(now=clock.now(), cache=_routing)
    revocations_confirm(now=clock.now())
    if not published:
        _routing.rest()
    return True


@shared_task(name="traffic.autopilot", base=ControlLoop)
def autopilot() -> bool:
    """Does nothing while another controller runs it."""
    rest = partial(rest_loop, autopilot.name)
    if autopilot_run(now=clock.now(), recorder=_recorders[AUTOPILOT], rest=rest):
        wake_ups.send("traffic.publish")
    return True


@shared_task(name="traffic.autoscale", base=ControlLoop)
def autoscale() -> bool:
    """Does nothing while another controller runs it."""
    autoscaling_run(now=clock.now(), recorder=_recorders[AUTOSCALER])
    return True


@shared_task(name="traffic.entry", base=ControlLoop)
def entry() -> bool:
    """Cloud ingresses, targets of their load balancers, and DNS. A failed step does not stop the others."""
    failed = [step for step in (cloud_ingresses_ensure, entry_targets_follow, entry_run) if not _step_succeeded(step)]
    return not failed


def _step_succeeded(step: Callable[..., object]) -> bool:
    try:
        step(now=clock.now())
    except Exception:
        log.exception("%s failed; the next pass makes it again", step.__name__)
        return False
    return True


@shared_task(name="traffic.ensure_ingresses", base=ControlLoop)
def ensure_ingresses() -> bool:
    """Each ingress is booted by one controller at a time."""
    ingresses_ensure(now=clock.now(), rest=partial(rest_loop, ensure_ingresses.name))
    return True


@shared_task(name="traffic.demand", base=ControlLoop)
def demand() -> bool:
    """Does nothing while another planner measures."""
    _meter.sample(now=clock.now())
    return True


@shared_task(name="traffic.plan", base=ControlLoop)
def plan() -> bool:
    """Makes forecasts when they are due, and the plan of the day that follows from them."""
    _planner.run(now=clock.now())
    return True


@signals.worker_shutdown.connect
def planner_stop(**_: object) -> None:
    """Stops the child process that plans the day, if this worker has one."""
    _planner.stop()


@shared_task(name="traffic.count_usage")
def count_usage() -> None:
    usage_count(now=clock.now(), leader_rows=_leader_rows)
    budgets_follow(now=clock.now())


@shared_task(name="traffic.trim_usage")
def trim_usage() -> None:
    usage_trim(now=clock.now())
    keys_retire(now=clock.now())
    demand_trim(now=clock.now())
    streams_trim(now=clock.now())
    forecasts_trim(now=clock.now())


@shared_task(name="traffic.fit_tokens")
def fit_tokens() -> None:
    token_fit_all(now=clock.now())


@shared_task(name="traffic.plan_roles")
def plan_roles() -> None:
    roles_plan(now=clock.now())


@shared_task(name="traffic.export_usage")
def export_usage() -> None:
    usage_export_days(target=settings.USAGE_EXPORT, now=clock.now())


@shared_task(name="traffic.run_batch_schedules")
def run_batch_schedules() -> None:
    """Several workers may run this at the same time; each time and object has one batch."""
    schedules_run(now=clock.now())


@shared_task(name="traffic.trim_async")
def trim_async() -> None:
    async_requests_expire(now=clock.now())
    async_requests_trim(now=clock.now())
    request_groups_trim(now=clock.now(), settings=SinkSettings())
    body_groups_trim(now=clock.now(), settings=AsyncSettings())
    refused_messages_trim(now=clock.now())
    responses_trim(now=clock.now())
    batches_trim(now=clock.now())
    stored_files_trim(now=clock.now())
    file_garbage_collect(now=clock.now())
