"""Reasons why a service refuses a request. Each interface maps them to its own errors."""


class Refusal(Exception):
    """Nothing was changed; the text has the reason for the caller."""


class InvalidInput(Refusal):
    """The request breaks a rule. `field`: dotted path of the value; `rule`: the rule's short name."""

    def __init__(self, *, field: str, rule: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.rule = rule


class Conflict(Refusal):
    """The request conflicts with the current state; a later retry may work."""


class Busy(Refusal):
    """There is no capacity now; the request is refused immediately. `retry_after_s`: when to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShareUsedUp(Busy):
    """The caller has used up their own share of the capacity; others still have theirs."""
