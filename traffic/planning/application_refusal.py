"""Why an application's request is not done, as OpenAI's errors say it. Pure."""

from kernel.refusals import Refusal

QUOTA_USED_UP = "insufficient_quota"
"""Code and type of the refusal when a tenant's budget is used up, as OpenAI has them."""


class ApplicationRefused(Refusal):
    """HTTP status, code and field of an error in OpenAI's form; `kind` is its type, where not that of its status."""

    def __init__(
        self, status: int, code: str | None, message: str, param: str | None = None, *, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind

    @property
    def is_passing(self) -> bool:
        """Whether the same request may be accepted soon."""
        return self.status in {429, 502, 503} and self.code != QUOTA_USED_UP
