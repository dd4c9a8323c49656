"""A topic that several killed sender processes read: every record has one outcome, and every outcome a result."""

import asyncio
import json
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from django.utils import timezone

from tests.fleet.webhooks.receiver import Receiver
from tests.traffic.async_requests.brokers import Broker, running_broker
from tests.traffic.async_requests.test_sender import sender_process, wait_until
from tests.traffic.rows import BODY, serving_fleet, standin_ingress
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planning.kafka import TopicSettings
from traffic.async_requests.services.queues import request_queue_declare
from traffic.keys.services import key_create

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.django_db(transaction=True)]
RECORDS = 2000
PARTITIONS = 4


@pytest.fixture
def ingress(settings: Any) -> Iterator[Receiver]:
    settings.PLAIN_LINKS = True
    with standin_ingress() as standin:
        serving_fleet(standin.port)
        yield standin


async def _fill(broker: Broker) -> None:
    await broker.create("orders", partitions=PARTITIONS)
    await broker.create("results")
    for partition in range(PARTITIONS):
        await broker.send("orders", *[BODY] * (RECORDS // PARTITIONS), partition=partition)


def _is_reached(count: int) -> bool:
    return AsyncRequest.objects.filter(published_at__isnull=False).count() >= count


@pytest.mark.usefixtures("ingress")
def test_every_record_has_one_outcome_and_a_result_through_kills_and_rebalances() -> None:
    with running_broker() as broker:
        asyncio.run(_fill(broker))
        now = timezone.now()
        key = key_create(name="orders", tenant="acme", actor="ann", now=now).key
        url, stated = f"kafka://{broker.address}/orders", TopicSettings(results_topic="results")
        queue = request_queue_declare(url=url, key=key.prefix, actor="ann", now=now, topic=stated)
        processes = [sender_process(), sender_process()]
        try:
            for count in (RECORDS // 10, RECORDS // 3, RECORDS // 2):
                wait_until(partial(_is_reached, count), f"{count} are published")
                processes[0].send_signal(signal.SIGKILL)
                processes.pop(0).wait()
                processes.append(sender_process())
            wait_until(partial(_is_reached, RECORDS), "all are published")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = asyncio.run(broker.records("results", RECORDS))
        places = [json.loads(record.value)["source"] for record in results]
        assert {(place["partition"], place["offset"]) for place in places} == {
            (partition, offset) for partition in range(PARTITIONS) for offset in range(RECORDS // PARTITIONS)
        }
        assert len({json.loads(record.value)["id"] for record in results}) == RECORDS
        assert AsyncRequest.objects.count() == AsyncRequest.objects.filter(state="done").count() == RECORDS
        assert not queue.refused.exists()
