"""Connects to the brokers of a topic, over TLS and with SASL if so declared. Import it only for a declared
topic, because it imports Kafka's client."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.conn import create_conn
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnknownTopicOrPartitionError,
    UnsupportedSaslMechanismError,
)

from traffic.async_requests.models import RequestQueue
from traffic.async_requests.planning.kafka import KafkaSecurity
from traffic.async_requests.services.queues import request_queue_password

POLL_MS = 1000
"""Longest wait for records; a stopping process has five seconds."""
CALL_LIMIT_MS = 10_000
FETCH_BYTES = 8 * 1024 * 1024
PARTITION_BYTES = 2 * 1024 * 1024
MOST_RECORD_BYTES = 6 * 1024 * 1024
"""Above the longest answer with its envelope."""


class NoBroker(OSError):
    """No broker takes a connection; the text says why for each."""


@asynccontextmanager
async def kafka_clients(queue: RequestQueue) -> AsyncIterator[tuple[AIOKafkaConsumer, AIOKafkaProducer]]:
    """Yields clients that are connected. Raises NoBroker if no broker takes a connection. Raises KafkaError if a call
    fails or the topic does not exist."""
    shared = _connection_options(queue)
    await _try_brokers(queue, shared)
    consumer = AIOKafkaConsumer(
        queue.name,
        group_id=queue.group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_bytes=FETCH_BYTES,
        max_partition_fetch_bytes=PARTITION_BYTES,
        fetch_max_wait_ms=POLL_MS,
        **shared,
    )
    producer = AIOKafkaProducer(
        acks="all",
        linger_ms=5,
        max_batch_size=PARTITION_BYTES // 8,
        max_request_size=MOST_RECORD_BYTES,
        **shared,
    )
    try:
        await consumer.start()
        if not consumer.partitions_for_topic(queue.name):
            raise UnknownTopicOrPartitionError(f"the topic {queue.name} does not exist on {queue.brokers}")
        await producer.start()
        yield consumer, producer
    finally:
        await asyncio.gather(consumer.stop(), producer.stop(), return_exceptions=True)


async def _try_brokers(queue: RequestQueue, options: Mapping[str, Any]) -> None:
    """Connects to a broker, because clients of Kafka log why none takes them, and raise an error without the reason."""
    connection = {name: value for name, value in options.items() if name != "bootstrap_servers"}
    problems = []
    for broker in options["bootstrap_servers"]:
        host, _, port = broker.rpartition(":")
        try:
            made = await create_conn(host.strip("[]"), int(port), **connection)
        except (OSError, KafkaError, LookupError, ValueError, AssertionError, EOFError) as error:
            problems.append(f"{broker}: {_problem(queue, error)}")
        else:
            made.close()
            return
    raise NoBroker("; ".join(problems))


def _problem(queue: RequestQueue, error: BaseException) -> str:
    """Says what an operator can change."""
    match error:
        case ssl.SSLCertVerificationError():
            whose = "ca_pem" if queue.ca_pem else "the host's authorities, because the queue has no ca_pem"
            text = f"its certificate is not accepted: {error.verify_message} (checked by {whose})"
        case ssl.SSLError():
            text = f"it does not answer in TLS ({error.reason}): does this port take {queue.security}?"
        case SaslAuthenticationFailed():
            text = "it does not accept the user or password"
        case UnsupportedSaslMechanismError():
            text = f"it does not offer {queue.mechanism}"
        case KafkaConnectionError() | ConnectionResetError() | EOFError():
            text = f"it closed the connection: does this port take {queue.security}?"
        case LookupError() | ValueError() | AssertionError():
            text = f"its answers are not those of {queue.mechanism or queue.security} ({type(error).__name__})"
        case TimeoutError():
            text = f"no answer within {CALL_LIMIT_MS / 1000:g} s: does this port take {queue.security}?"
        case _:
            text = str(error) or type(error).__name__
    return text


def _connection_options(queue: RequestQueue) -> dict[str, Any]:
    security = KafkaSecurity(queue.security)
    options: dict[str, Any] = {
        "bootstrap_servers": queue.brokers.split(","),
        "client_id": "switchyard",
        "request_timeout_ms": CALL_LIMIT_MS,
        "security_protocol": security.value,
    }
    if security.has_tls:
        options["ssl_context"] = ssl.create_default_context(cadata=queue.ca_pem or None)
    if security.has_user:
        options |= {
            "sasl_mechanism": queue.mechanism,
            "sasl_plain_username": queue.username,
            "sasl_plain_password": request_queue_password(queue),
        }
    return options
