"""Calls of the control plane, made to the cloud of tests."""

from collections.abc import Callable
from typing import Any

from botocore import xform_name
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from fleet.clouds.aws.calls import Refused, Unanswered
from lab.cloud.server import World
from tests.aws_calls_made import made


class Calls:
    """As `fleet.clouds.aws.calls.call`. `before`: by operation, run once before the call is made."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.before: dict[str, Callable[[], None]] = {}
        self._clients: dict[tuple[str, str], Any] = {}

    def __call__(self, service: str, operation: str, region: str, **params: Any) -> dict[str, Any]:
        self.before.pop(operation, lambda: None)()
        if (service, region) not in self._clients:
            self._clients[service, region] = self.world.client(service, region)
        try:
            answer = getattr(self._clients[service, region], xform_name(operation))(**params)
        except ClientError as error:
            stated = error.response["Error"]
            made[service, operation].add(stated["Code"])
            if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
                raise Unanswered(stated["Code"], stated["Message"]) from error
            raise Refused(stated["Code"], stated["Message"]) from error
        except (BotoCoreError, ResponseParserError) as error:
            raise Unanswered("", type(error).__name__) from error
        made[service, operation].add("")
        return dict(answer)
