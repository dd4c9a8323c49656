"""How traffic calls AWS: by one function that a caller gives it, so that nothing here loads a client."""

from typing import Any, Protocol


class AwsCall(Protocol):
    """One call of AWS, by boto3's name of the service and AWS's name of the operation.

    Raises:
        CallRefused: AWS answered with an error: nothing was carried out.
        CallUnanswered: it may have been carried out.
    """

    def __call__(self, service: str, operation: str, region: str, /, **params: Any) -> dict[str, Any]: ...


class CallRefused(Exception):
    """`code` and `text` are AWS's."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


class CallUnanswered(Exception):
    """No answer came, or none that says whether the call was carried out."""
