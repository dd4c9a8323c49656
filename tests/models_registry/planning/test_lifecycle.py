"""A version goes forward only, and only what cannot change any more may serve."""

from itertools import product

import pytest

from models_registry.planning.lifecycle import (
    VERSION_ALLOWED,
    VERSION_TONE,
    VersionState,
    may_be_rolled_out,
    states_before,
)

ORDER = list(VersionState)


def test_every_state_says_where_it_goes_and_how_it_feels() -> None:
    assert set(VERSION_ALLOWED) == set(VERSION_TONE) == set(VersionState)


@pytest.mark.parametrize(("state", "to"), list(product(VersionState, VersionState)))
def test_no_version_goes_back(state: VersionState, to: VersionState) -> None:
    if to in VERSION_ALLOWED[state]:
        assert ORDER.index(to) > ORDER.index(state)
        assert state in states_before(to)


@pytest.mark.parametrize(
    ("state", "plainly", "with_the_flag"),
    [("draft", False, False), ("validated", False, True), ("released", True, True), ("retired", False, False)],
)
def test_released_versions_may_be_rolled_out_and_validated_ones_on_request(
    state: str, plainly: bool, with_the_flag: bool
) -> None:
    assert may_be_rolled_out(VersionState(state), allow_unreleased=False) is plainly
    assert may_be_rolled_out(VersionState(state), allow_unreleased=True) is with_the_flag
