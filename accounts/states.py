"""States of tokens and of requests for two-person approval, and kinds of second factors. Few states; reason and outcome
say the rest."""

from enum import StrEnum

from kernel.tones import Tone


class ApprovalState(StrEnum):
    """Pending until decided or its time is over. Failed: approved, and then it could not be done."""

    PENDING = "pending"
    DONE = "done"
    REJECTED = "rejected"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    FAILED = "failed"


APPROVAL_TONE = {
    ApprovalState.PENDING: Tone.MOVING,
    ApprovalState.DONE: Tone.OK,
    ApprovalState.REJECTED: Tone.IDLE,
    ApprovalState.WITHDRAWN: Tone.IDLE,
    ApprovalState.EXPIRED: Tone.WARN,
    ApprovalState.FAILED: Tone.BAD,
}
APPROVAL_STATES = [(state.value, state.value.capitalize()) for state in ApprovalState]


class TokenState(StrEnum):
    """Only an active one opens anything."""

    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"

    @property
    def tone(self) -> Tone:
        return {TokenState.ACTIVE: Tone.OK, TokenState.EXPIRED: Tone.IDLE, TokenState.REVOKED: Tone.IDLE}[self]


TOKEN_STATES = [(state.value, state.value.capitalize()) for state in TokenState]


class FactorKind(StrEnum):
    """A second factor: an app that shows codes, or a key (or passkey) that signs."""

    APP = "app"
    KEY = "key"

    @property
    def described(self) -> str:
        return {FactorKind.APP: "authenticator app", FactorKind.KEY: "security key"}[self]


FACTOR_KINDS = [(kind.value, kind.described.capitalize()) for kind in FactorKind]
