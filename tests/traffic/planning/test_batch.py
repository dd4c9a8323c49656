"""States of a batch, and what may be asked of one."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.batch import (
    ALLOWED,
    BATCH_TONE,
    ENDED,
    STAMPS,
    BatchState,
    Tally,
    cancel_refusal,
    checked_batch,
)

FILE = "file-" + "0" * 32
ASKED: dict[str, Any] = {
    "input_file_id": FILE,
    "endpoint": "/v1/embeddings",
    "completion_window": "24h",
}
NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


def test_every_state_can_end_has_a_tone_and_says_since_when() -> None:
    assert {BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED} == ENDED
    assert set(BATCH_TONE) == set(BatchState)
    assert set(STAMPS) == set(BatchState) - {BatchState.VALIDATING}
    reached, before = {BatchState.VALIDATING}, set[BatchState]()
    while reached != before:
        before = set(reached)
        reached |= {following for state in before for following in ALLOWED[state]}
    assert reached == set(BatchState)


def test_what_is_being_written_or_has_ended_is_not_cancelled() -> None:
    refused = {state for state in BatchState if cancel_refusal(state)}
    assert refused == {BatchState.FINALIZING, BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED}


def test_openais_fields_alone_mean_a_day_and_the_usual_priority() -> None:
    asked = checked_batch({**ASKED, "metadata": None})
    assert (asked.window_s, asked.priority, asked.metadata, asked.output_kept_s) == (86_400, 5, {}, None)
    assert asked.expires_at(NOW) == NOW + timedelta(days=1)


@pytest.mark.parametrize(
    ("window", "seconds"), [("10m", 600), ("90m", 5400), ("4h", 14_400), ("7d", 604_800), ("24h", 86_400)]
)
def test_other_windows_are_ours(window: str, seconds: int) -> None:
    asked = checked_batch({**ASKED, "switchyard": {"completion_window": window, "priority": 0}})
    assert (asked.window, asked.window_s, asked.priority) == (window, seconds, 0)


@pytest.mark.parametrize("window", ["9m", "8d", "0h", "4", "h", "4 h", "-4h", "4H", "٤h", 4, None, "99999999h"])
def test_a_window_that_is_none_is_refused(window: object) -> None:
    with pytest.raises(ApplicationRefused, match="from 10m to 7d, such as"):
        checked_batch({**ASKED, "switchyard": {"completion_window": window}})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from([*ASKED, "metadata", "switchyard", "priority", "x"]), inner)
        ),
    )
)
def test_whatever_is_asked_it_is_accepted_or_refused_by_field(payload: object) -> None:  # fmt: skip
    try:
        asked = checked_batch(payload)
    except ApplicationRefused as refusal:
        status = refusal.status
    else:
        status = 200 if asked.window_s >= 600 else 500
    assert status < 500


@given(*[st.builds(Tally, *[st.integers(0, 10**9)] * 6)] * 3)
def test_tallies_add_up_in_any_order(one: Tally, two: Tally, three: Tally) -> None:
    assert one.plus(two).plus(three) == three.plus(one.plus(two))
    usage = one.plus(two).usage_json()
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
