"""Why an application's request is not done, as OpenAI's errors say it. Pure."""

from kernel.refusals import Refusal


class ApplicationRefused(Refusal):
    """HTTP status, code and field of an error in OpenAI's form."""

    def __init__(self, status: int, code: str | None, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
