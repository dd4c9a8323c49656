"""Reads queues, and bodies that were too long for one. Knows nothing of what messages say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fleet.providers.aws import calls

AT_ONCE = 10
WAIT_S = 1
"""A long poll, so that all servers of the queue are asked; short, because a region's other steps wait."""


@dataclass(frozen=True, slots=True)
class Message:
    """`handle`: by which it is deleted, until its visibility is over. `attributes`: those with a text, by name."""

    id: str
    handle: str
    body: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    sent_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """`waiting`: about how many messages can be received. `has_dead_letters`: what comes too often goes elsewhere."""

    waiting: int
    has_dead_letters: bool


def messages_receive(
    region: str, url: str, *, most: int = AT_ONCE, wait_s: int | None = None, visibility_s: int | None = None
) -> tuple[Message, ...]:
    """Some of those that are there, `most` (ten at most) of them. `visibility_s`: how long others do not see them; the
    queue's own time if it is left out.

    Raises:
        CallFailed: none came.
    """
    asked: dict[str, Any] = {} if visibility_s is None else {"VisibilityTimeout": visibility_s}
    answer = calls.call(
        "sqs",
        "ReceiveMessage",
        region,
        QueueUrl=url,
        MaxNumberOfMessages=most,
        WaitTimeSeconds=WAIT_S if wait_s is None else wait_s,
        MessageAttributeNames=["All"],
        MessageSystemAttributeNames=["SentTimestamp"],
        **asked,
    )
    return tuple(_message(one) for one in answer.get("Messages", ()))


def _message(one: Mapping[str, Any]) -> Message:
    said = one.get("MessageAttributes") or {}
    texts = {name: value["StringValue"] for name, value in said.items() if "StringValue" in value}
    sent_ms = (one.get("Attributes") or {}).get("SentTimestamp")
    sent_at = datetime.fromtimestamp(int(sent_ms) / 1000, UTC) if sent_ms else None
    return Message(one["MessageId"], one["ReceiptHandle"], one["Body"], texts, sent_at)


def messages_delete(region: str, url: str, messages: Sequence[Message]) -> None:
    """Take these off the queue. One that could not be deleted comes again, and is known then.

    Raises:
        CallFailed: none was deleted, or nobody knows.
    """
    if messages:
        entries = [{"Id": str(index), "ReceiptHandle": one.handle} for index, one in enumerate(messages)]
        calls.call("sqs", "DeleteMessageBatch", region, QueueUrl=url, Entries=entries)


def queue_facts(region: str, url: str) -> QueueFacts:
    """What a queue says of itself.

    Raises:
        CallFailed: nothing.
    """
    names = ["ApproximateNumberOfMessages", "RedrivePolicy"]
    said = calls.call("sqs", "GetQueueAttributes", region, QueueUrl=url, AttributeNames=names).get("Attributes", {})
    return QueueFacts(int(said.get("ApproximateNumberOfMessages", 0)), bool(said.get("RedrivePolicy")))


def object_read(region: str, bucket: str, key: str, *, owner: str, most: int, limit_s: float) -> bytes:
    """An object of `most` bytes at most, of a bucket of the account `owner`: names of buckets are anybody's to take.

    Raises:
        CallFailed: it was not read, or not within `limit_s`.
        TooLong: it has more bytes.
    """
    answer = calls.call("s3", "GetObject", region, Bucket=bucket, Key=key, ExpectedBucketOwner=owner)
    return calls.body_read(answer["Body"], most=most, limit_s=limit_s)
