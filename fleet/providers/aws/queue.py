"""Reads a region's queue of events. Knows nothing of what they say."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.providers.aws import calls

AT_ONCE = 10
WAIT_S = 1
"""A long poll, so that all servers of the queue are asked; short, because the region's other steps wait."""


@dataclass(frozen=True, slots=True)
class Message:
    """`handle`: by which it is deleted, until its visibility is over."""

    id: str
    handle: str
    body: str


def messages_receive(region: str, url: str) -> tuple[Message, ...]:
    """Some of those that are there, ten at most.

    Raises:
        CallFailed: none came.
    """
    answer = calls.call(
        "sqs", "ReceiveMessage", region, QueueUrl=url, MaxNumberOfMessages=AT_ONCE, WaitTimeSeconds=WAIT_S
    )
    return tuple(Message(one["MessageId"], one["ReceiptHandle"], one["Body"]) for one in answer.get("Messages", ()))


def messages_delete(region: str, url: str, messages: Sequence[Message]) -> None:
    """Take these off the queue. One that could not be deleted comes again, and is known then.

    Raises:
        CallFailed: none was deleted, or nobody knows.
    """
    if messages:
        entries = [{"Id": str(index), "ReceiptHandle": one.handle} for index, one in enumerate(messages)]
        calls.call("sqs", "DeleteMessageBatch", region, QueueUrl=url, Entries=entries)
