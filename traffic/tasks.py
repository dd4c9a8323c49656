"""Celery's way into the services of traffic."""

from celery import shared_task

from kernel import clock
from traffic.services.async_lease import async_requests_expire
from traffic.services.async_request import async_requests_trim
from traffic.services.autopilot import autopilot_run
from traffic.services.ingress import ingresses_ensure
from traffic.services.key import keys_retire, revocations_confirm
from traffic.services.routing import drained_cells_mark, tables_publish
from traffic.services.usage import usage_count, usage_trim


@shared_task(name="traffic.publish")
def publish() -> None:
    tables_publish(now=clock.now())
    drained_cells_mark(now=clock.now())
    revocations_confirm(now=clock.now())


@shared_task(name="traffic.autopilot")
def autopilot() -> None:
    if autopilot_run(now=clock.now()):
        tables_publish(now=clock.now())


@shared_task(name="traffic.count_usage")
def count_usage() -> None:
    usage_count(now=clock.now())


@shared_task(name="traffic.trim_usage")
def trim_usage() -> None:
    usage_trim(now=clock.now())
    keys_retire(now=clock.now())


@shared_task(name="traffic.ensure_ingresses")
def ensure_ingresses() -> None:
    ingresses_ensure(now=clock.now())


@shared_task(name="traffic.trim_async")
def trim_async() -> None:
    async_requests_expire(now=clock.now())
    async_requests_trim(now=clock.now())
