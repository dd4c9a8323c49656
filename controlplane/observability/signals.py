"""Carries a request's number and trace to the tasks that it sends, and counts and times the tasks of workers. Listens
to Celery's signals; it changes no task."""

import logging
from time import perf_counter, time
from typing import Any

from celery import signals

from controlplane.observability.exposition import serve_metrics
from kernel.metrics import FOLDER, TASK_RUNS, TASK_SECONDS, TASKS_SENT
from kernel.process_role import ProcessRole, process_role
from kernel.tasks import SENT_AT
from kernel.tracing import MESSAGE_HEADER, bind_request_id, request_id, span, spans_flush, traceparent

TRACEPARENT = "traceparent"

log = logging.getLogger(__name__)
_running: dict[str, tuple[Any, Any, dict[str, Any], float]] = {}


@signals.before_task_publish.connect
def _sending(sender: str = "", headers: dict[str, Any] | None = None, **_: Any) -> None:
    TASKS_SENT.labels(sender, process_role().value).inc()
    if headers is not None:
        headers[SENT_AT] = str(time())
        headers |= {name: text for name, text in ((MESSAGE_HEADER, request_id()), (TRACEPARENT, traceparent())) if text}


@signals.task_prerun.connect
def _begins(task_id: str = "", task: Any = None, **_: Any) -> None:
    numbered = bind_request_id(_header(task, MESSAGE_HEADER) or task_id)
    numbered.__enter__()
    parent = _header(task, TRACEPARENT)
    traced = span(task.name, parent=parent, kind="consumer")
    attributes = traced.__enter__()
    attributes["switchyard.request_id"] = request_id()
    _running[task_id] = (numbered, traced, attributes, perf_counter())


def _header(task: Any, name: str) -> str:
    """Of the task's message; where it runs eagerly, of the call."""
    return str(task.request.get(name) or (task.request.headers or {}).get(name) or "")


@signals.task_postrun.connect
def _ended(task_id: str = "", task: Any = None, state: str | None = None, **_: Any) -> None:
    if task_id not in _running:
        return
    numbered, traced, attributes, began = _running.pop(task_id)
    attributes["failed"] = state != "SUCCESS"
    traced.__exit__(None, None, None)
    numbered.__exit__(None, None, None)
    TASK_SECONDS.labels(task.name).observe(perf_counter() - began)
    TASK_RUNS.labels(task.name, str(state or "unknown").lower()).inc()


@signals.worker_init.connect
def _loops_scraped(**_: Any) -> None:
    """Control loops run without a broker, and a worker is ready only once it has one."""
    if process_role() is ProcessRole.CONTROLLER:
        serve_metrics()


@signals.worker_ready.connect
def _scraped(**_: Any) -> None:
    if process_role() is not ProcessRole.CONTROLLER:
        serve_metrics()


@signals.worker_process_shutdown.connect
def _child_ends(pid: int = 0, **_: Any) -> None:
    from prometheus_client.multiprocess import mark_process_dead

    spans_flush()
    if FOLDER is not None and pid:
        mark_process_dead(pid, str(FOLDER))  # type: ignore[no-untyped-call]
