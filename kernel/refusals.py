"""Why a service refuses a request. Says nothing of HTTP: each interface answers these in its own way."""


class Refusal(Exception):
    """Nothing was changed; the text says why, for the user or program that requested it."""


class InvalidInput(Refusal):
    """The request breaks a rule. `field`: dotted path of the value; `rule`: the rule's short name."""

    def __init__(self, *, field: str, rule: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.rule = rule


class Conflict(Refusal):
    """The request does not fit the present state; trying again later may work."""


class Busy(Refusal):
    """There is no room for it now: it is refused at once, not kept waiting. `retry_after_s`: when to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
