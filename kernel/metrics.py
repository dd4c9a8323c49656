"""The control plane's Prometheus metrics. Labels are bounded: names that people choose come from the database, never
from requests.

The long-running processes of one host write into one folder (prometheus-client's multiprocess mode), so each of them
exports the metrics of all; short commands export none."""

import os
from pathlib import Path

from django.conf import settings

from kernel.process_role import ProcessRole, process_role


def _shared_folder() -> Path | None:
    if process_role() is ProcessRole.COMMAND:
        return None
    folder = Path(os.environ.get("PROMETHEUS_MULTIPROC_DIR") or settings.SWITCHYARD_HOME / "metrics")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    return folder


FOLDER = _shared_folder()
"""Set before the import of the library, which reads it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402

OURS = CollectorRegistry()
"""Only our own metrics, without those of Python's runtime."""

HTTP_REQUESTS = Counter(
    "switchyard_http_requests", "Requests that web answered.", ["surface", "method", "status"], registry=OURS
)
HTTP_SECONDS = Histogram(
    "switchyard_http_request_seconds",
    "How long web took to answer.",
    ["surface"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10),
    registry=OURS,
)
AGENTS_CONNECTED = Gauge(
    "switchyard_agents_connected", "Agents with an open socket.", ["kind"], multiprocess_mode="livesum", registry=OURS
)
FAULTS_DROPPED = Counter(
    "switchyard_faults_dropped",
    "Evidence of faults that was dropped because it was too large or too much from one node.",
    ["reason"],
    registry=OURS,
)
JOINS_REFUSED = Counter(
    "switchyard_joins_refused",
    "Hosts that did not join, by whether their token is known.",
    ["token"],
    registry=OURS,
)
KEPT_RESPONSES = Counter(
    "switchyard_responses_kept",
    "Responses of OpenAI's Responses API that were to be kept, made while their application waited.",
    ["outcome"],
    registry=OURS,
)
TASK_RUNS = Counter("switchyard_task_runs", "Tasks that workers ran.", ["task", "outcome"], registry=OURS)
TASK_SECONDS = Histogram(
    "switchyard_task_seconds",
    "How long tasks ran.",
    ["task"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 150),
    registry=OURS,
)
TASKS_SENT = Counter(
    "switchyard_tasks_sent",
    "Tasks sent by the schedule of housekeeping and by wake-ups.",
    ["task", "sender"],
    registry=OURS,
)
ASYNC_ATTEMPTS = Counter(
    "switchyard_async_attempts", "Attempts to send near-real-time requests.", ["outcome"], registry=OURS
)
BATCH_LINES = Counter("switchyard_batch_lines", "Attempts at lines of batches, by outcome.", ["outcome"], registry=OURS)
WEBHOOK_ATTEMPTS = Counter(
    "switchyard_webhook_attempts", "Messages to webhooks, by outcome.", ["outcome"], registry=OURS
)
AUDIT_RECORDS = Counter("switchyard_audit_records", "Audit records written.", ["outcome"], registry=OURS)
