"""The states of model versions and of their validations, which changes are allowed, and how each feels. Pure.

A draft may be edited. From `validated` on nothing of a version changes but its state, which goes forward only.
"""

from enum import StrEnum

from kernel.tones import Tone


class VersionState(StrEnum):
    DRAFT = "draft"
    VALIDATED = "validated"
    RELEASED = "released"
    RETIRED = "retired"


VERSION_ALLOWED: dict[VersionState, frozenset[VersionState]] = {
    VersionState.DRAFT: frozenset({VersionState.VALIDATED}),
    VersionState.VALIDATED: frozenset({VersionState.RELEASED, VersionState.RETIRED}),
    VersionState.RELEASED: frozenset({VersionState.RETIRED}),
    VersionState.RETIRED: frozenset(),
}

VERSION_TONE: dict[VersionState, Tone] = {
    VersionState.DRAFT: Tone.IDLE,
    VersionState.VALIDATED: Tone.BAKE,
    VersionState.RELEASED: Tone.OK,
    VersionState.RETIRED: Tone.IDLE,
}


class ValidationState(StrEnum):
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"


VALIDATION_TONE: dict[ValidationState, Tone] = {
    ValidationState.RUNNING: Tone.MOVING,
    ValidationState.PASSED: Tone.OK,
    ValidationState.FAILED: Tone.BAD,
}


def states_before(to: VersionState) -> frozenset[VersionState]:
    """The states from which a version may go to this one."""
    return frozenset(state for state, allowed in VERSION_ALLOWED.items() if to in allowed)


def may_be_rolled_out(state: VersionState, *, allow_unreleased: bool) -> bool:
    """Released versions, and validated ones where `allow_unreleased`. Drafts still change, so never."""
    return state is VersionState.RELEASED or (allow_unreleased and state is VersionState.VALIDATED)


def choices(states: type[StrEnum]) -> list[tuple[str, str]]:
    """Django's `choices` for an enum: value and label."""
    return [(state.value, state.value.capitalize()) for state in states]
