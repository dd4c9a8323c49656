"""The Celery application, with the queues of the control loops and beat's table of housekeeping.

Housekeeping may wait in its queue. Control loops may not: the worker of their queue starts their passes itself
(kernel.loop_worker). Messages only ask for another look: every task loads the truth from PostgreSQL, so a lost or
repeated one is harmless."""

import logging
import os
import sys
from time import monotonic
from typing import Any

from celery import Celery, bootsteps, signals
from celery.beat import Scheduler

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from django.conf import settings
from django.db import close_old_connections, connections

from controlplane.processes import wait_for_database
from controlplane.secret_key import require_secret_key
from kernel.control_standing import HEARTBEAT_EVERY_S
from kernel.process_role import ProcessRole, process_role

EXPIRES_S = 60.0
"""Of tasks that beat sends every few seconds. Far above the delay of a slow worker, or all of them would expire and
none would run. Low enough that a worker that was stopped does not start with an hour of them."""

METRICS_EVERY_S = 60.0
"""The period of the alarm that they feed (deploy/aws/base.yaml)."""

BEAT_LEASE, BEAT_LEASE_S = "beat", 20.0
"""Of several workers, one sends housekeeping tasks. Far above the longest time between two of them."""
LEADS_FOR_S = 8.0
"""A worker that has taken the lease does not take it again for this time."""
TICK_AGAIN_AFTER_S = 1.0
"""After an error."""

log = logging.getLogger(__name__)


class HousekeepingSchedule(Scheduler):
    """Beat's schedule, in memory: after a start each task waits for one interval."""

    producer: Any = None  # a connection of Celery's would retry for as long as the broker is away
    _leads_until_s = 0.0

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send the task, unless another worker does."""
        from kernel import wake_ups

        now_s = monotonic()
        if now_s >= self._leads_until_s:
            if not _is_leading_beat():
                return
            self._leads_until_s = now_s + LEADS_FOR_S
        wake_ups.send_task(entry.task, {}, expires_s=entry.options.get("expires"))

    def schedules_equal(self, old_schedules: Any, new_schedules: Any) -> bool:
        """The table of a running process does not change, and a comparison at each tick is expensive."""
        return old_schedules is not None and new_schedules is not None

    def adjust(self, n: Any, drift: float = 0.0) -> Any:
        """Sleep until something is due. Celery's own wakes 10 ms before, and polls without a pause until then."""
        return super().adjust(n, drift)


def _is_leading_beat() -> bool:
    """True also without PostgreSQL, as a task that is sent twice is harmless. Closes the connection, because the
    children of the worker's pool are forks of this process."""
    from django.db import DatabaseError, connection

    from kernel import clock
    from kernel.leases import lease_take, this_holder

    try:
        return lease_take(name=BEAT_LEASE, holder=this_holder(), ttl_s=BEAT_LEASE_S, now=clock.now()) is not None
    except DatabaseError:
        return True
    finally:
        if not connection.in_atomic_block:
            connection.close()


class Housekeeping(bootsteps.StartStopStep):
    """Runs the schedule on the event loop of the worker that runs its tasks."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._schedule: HousekeepingSchedule | None = None

    def include_if(self, worker: Any) -> bool:
        return process_role() is ProcessRole.WORKER

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Called for each new connection to the broker, after which the loop's timers are gone."""
        schedule = self._schedule = self._schedule or HousekeepingSchedule(worker.app)

        def tick() -> None:
            wait_s = TICK_AGAIN_AFTER_S
            try:
                wait_s = schedule.tick()
            except Exception:
                log.exception("housekeeping could not be scheduled; next try in %g s", wait_s)
            hub.timer.call_after(wait_s, tick)

        hub.timer.call_after(0.0, tick)


app = Celery("switchyard")
app.conf.update(
    broker_url=settings.REDIS_URL.replace("unix://", "redis+socket://"),
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_soft_time_limit=120,
    task_time_limit=150,
    # Above the hard limit, else a task is handed out again while it still runs.
    broker_transport_options={
        "visibility_timeout": 600,
        "unacked_restore_throttle": 1,
        "socket_timeout": 5,
        "socket_connect_timeout": 2,
        "global_keyprefix": "switchyard:",
    },
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_channel_error_retry=True,  # a broker that answers with errors is no reason to end a worker, either
    worker_enable_prefetch_count_reduction=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_hijack_root_logger=False,
    # A caller whose wake-up cannot be sent continues: the periodic pass finds the work.
    task_publish_retry=False,
    task_routes={name: {"queue": queue} for queue, loops in settings.CONTROL_LOOPS.items() for name in loops},
    timezone="UTC",
    beat_schedule={
        "kernel-heartbeat": {
            "task": "kernel.heartbeat",
            "schedule": HEARTBEAT_EVERY_S,
            "options": {"expires": EXPIRES_S},
        },
        "fleet-step-windows": {"task": "fleet.step_windows", "schedule": 5.0, "options": {"expires": EXPIRES_S}},
        "fleet-sample-load": {"task": "fleet.sample_load", "schedule": 5.0, "options": {"expires": EXPIRES_S}},
        "fleet-trim-history": {"task": "fleet.trim_history", "schedule": 600.0, "options": {"expires": 600.0}},
        "fleet-judge-token-drift": {"task": "fleet.judge_token_drift", "schedule": 30.0, "options": {"expires": 30.0}},
        "fleet-judge-speculation-drift": {
            "task": "fleet.judge_speculation_drift",
            "schedule": 60.0,
            "options": {"expires": 60.0},
        },
        "fleet-send-cloud-metrics": {
            "task": "fleet.send_cloud_metrics",
            "schedule": METRICS_EVERY_S,
            "options": {"expires": METRICS_EVERY_S},
        },
        "fleet-trim-deliveries": {"task": "fleet.trim_deliveries", "schedule": 3600.0},
        # Each new validation wakes it; this continues after a lost wake-up or worker.
        "models-validate": {"task": "models_registry.validate", "schedule": 30.0, "options": {"expires": EXPIRES_S}},
        "models-trim-uploads": {"task": "models_registry.trim_uploads", "schedule": 3600.0},
        "fleet-trim-join-tokens": {"task": "fleet.trim_join_tokens", "schedule": 3600.0},
        "fleet-trim-certificates": {"task": "fleet.trim_certificates", "schedule": 3600.0},
        "fleet-judge-certificates": {"task": "fleet.judge_certificates", "schedule": 3600.0},
        "fleet-advance-authorities": {
            "task": "fleet.advance_authorities",
            "schedule": 10.0,
            "options": {"expires": EXPIRES_S},
        },
        "traffic-count-usage": {"task": "traffic.count_usage", "schedule": 5.0, "options": {"expires": EXPIRES_S}},
        "traffic-export-usage": {"task": "traffic.export_usage", "schedule": 600.0, "options": {"expires": 600.0}},
        "traffic-fit-tokens": {"task": "traffic.fit_tokens", "schedule": 3600.0, "options": {"expires": 3600.0}},
        "traffic-plan-roles": {"task": "traffic.plan_roles", "schedule": 30.0, "options": {"expires": 30.0}},
        "traffic-run-batch-schedules": {
            "task": "traffic.run_batch_schedules",
            "schedule": 5.0,
            "options": {"expires": EXPIRES_S},
        },
        "traffic-trim-usage": {"task": "traffic.trim_usage", "schedule": 3600.0},
        "traffic-trim-async": {"task": "traffic.trim_async", "schedule": 60.0, "options": {"expires": 60.0}},
        "accounts-expire-approvals": {
            "task": "accounts.expire_approvals",
            "schedule": 60.0,
            "options": {"expires": 60.0},
        },
        "audit-export": {"task": "audit.services", "schedule": 5.0, "options": {"expires": EXPIRES_S}},
        "kernel-trim-events": {"task": "kernel.trim_events", "schedule": 3600.0},
        "kernel-trim-changes": {"task": "kernel.trim_changes", "schedule": 600.0},
        "kernel-trim-idempotent": {"task": "kernel.trim_idempotent_answers", "schedule": 3600.0},
    },
)
# Celery closes the connection to the database before and after each task unless told how many it may serve. Here it
# lives as Django's do: so long, and not if it is broken.
app.conf["CELERY_DB_REUSE_MAX"] = sys.maxsize


@signals.task_prerun.connect(weak=False)
def _begin_with_a_connection_that_works(task: Any, **_: object) -> None:
    if not task.request.is_eager:  # else the connection is its caller's
        close_old_connections()


@signals.celeryd_init.connect(weak=False)
def _wait_until_it_may_work(**_: object) -> None:
    require_secret_key()
    wait_for_database()


@signals.worker_init.connect(weak=False)
def _store_what_is_shipped(**_: object) -> None:
    """The agent's release and the instance types, before anything is launched."""
    if process_role() is ProcessRole.CONTROLLER:
        from fleet.releases.services.releases import releases_refresh
        from kernel import clock
        from models_registry.instance_types.services import instance_types_ship

        releases_refresh(now=clock.now())
        instance_types_ship()
        connections.close_all()  # each loop has its own


app.steps["worker"] |= {"kernel.loop_worker:ControlLoops", Housekeeping}
app.autodiscover_tasks(["audit", "kernel", "accounts", "models_registry", "fleet", "traffic"])
