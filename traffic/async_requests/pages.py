"""The page of near-real-time queues: what waits for each model, and the request queues and topics that feed it. It
decides nothing and shows no content."""

from collections.abc import Sequence
from typing import Any

from django.db.models import Count, QuerySet

from controlplane.dashboard.fragments import Fragment, Page, PageRequest
from controlplane.dashboard.lists import Column, List
from kernel.tones import Tone
from traffic.async_requests.models import RequestQueue
from traffic.async_requests.planner import QueueState
from traffic.async_requests.selectors import ModelQueue, model_queues

QUEUE_TONE = {
    QueueState.NEW: Tone.IDLE,
    QueueState.READING: Tone.OK,
    QueueState.FULL: Tone.WARN,
    QueueState.STOPPED: Tone.IDLE,
    QueueState.UNREAD: Tone.BAD,
}
TOPIC = ("batches",)


def _queues(request: PageRequest) -> Sequence[ModelQueue]:
    return model_queues(request.now)


MODEL_LIST: List[ModelQueue] = List(
    name="models",
    columns=(
        Column("model", "Model", lambda row: row.model, ("model",)),
        Column("region", "Region", lambda row: row.region, ("region",)),
        Column("waiting", "Waiting", lambda row: row.waiting, ("waiting",), "number", is_newest_first=True),
        Column("sending", "Sending", lambda row: row.sending, ("sending",), "number", is_newest_first=True),
        Column("oldest", "Oldest", lambda row: row.oldest_at, ("oldest_at",), "number"),
        Column("rate", "Ended/s", lambda row: row.ended_per_s, ("ended_per_s",), "number", "In the last minute"),
        Column("failed", "Failed", lambda row: row.failed, ("failed",), "number", "Failed or expired within it"),
    ),
    query=_queues,
    find=("model", "region"),
    by_value=True,
)


def _topics(request: PageRequest) -> "QuerySet[RequestQueue]":
    return RequestQueue.objects.select_related("key").annotate(dead=Count("refused"))


TOPIC_LIST: List[Any] = List(
    name="request-queues",
    prefix="topics-",
    columns=(
        Column("queue", "Queue or topic", lambda row: row.name, ("name",)),
        Column("state", "State", lambda row: row.state, ("state",), choices=tuple(QueueState)),
        Column("tenant", "Tenant", lambda row: row.key.tenant, ("key__tenant",), "wide"),
        Column("waiting", "Waiting", lambda row: row.waiting, ("waiting",), "number", is_newest_first=True),
        Column("read", "Read", lambda row: row.read_at, ("read_at",), "wide number"),
        Column("dead", "Refused", lambda row: row.dead, ("dead",), "number", "Messages without a valid request"),
        Column("reason", "Reason", lambda row: row.reason, css="wide"),
    ),
    query=_topics,
    rows=lambda queues, now: [_toned(queue) for queue in queues],
    order=("name", "id"),
    find=("name", "key__tenant", "url"),
)


def _toned(queue: Any) -> Any:
    queue.tone = QUEUE_TONE[QueueState(queue.state)]
    return queue


QUEUES = Page(
    section="batches",
    title="Near-real-time queues",
    fragments=(
        Fragment("models", "Models", TOPIC, "traffic/async_requests/models.html", MODEL_LIST.page),
        Fragment("request-queues", "Queues and topics", TOPIC, "traffic/async_requests/topics.html", TOPIC_LIST.page),
    ),
    lists=(MODEL_LIST, TOPIC_LIST),
)
