"""Why a service will not do what it was asked. Says nothing of HTTP: each interface answers these in its own way."""


class Refusal(Exception):
    """Nothing was changed; the text says why, for the person or program that asked."""


class InvalidInput(Refusal):
    """What was asked for breaks a rule. `field`: dotted path of the value; `rule`: the rule's short name."""

    def __init__(self, *, field: str, rule: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.rule = rule


class Conflict(Refusal):
    """What was asked for does not fit the state that the thing is in now; asking again later may work."""
