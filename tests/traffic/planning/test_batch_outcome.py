"""Outcomes of lines, and the journal that keeps them through a crash."""

import io
import json

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.async_request import AttemptResponse
from traffic.planning.batch import Tally
from traffic.planning.batch_outcome import (
    Outcome,
    error_key,
    journal_line,
    journal_outcomes,
    outcome_of,
    unsent_outcome,
)

BODY = b'{"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}'
OUTCOMES = st.lists(
    st.builds(
        lambda position, body: outcome_of(position, "id", "c", AttemptResponse(200, json.dumps({"x": body}).encode())),
        st.integers(0, 999),
        st.text(),
    ),
    max_size=8,
)


def test_an_answer_is_kept_whole_and_its_tokens_are_counted() -> None:
    outcome = outcome_of(4, "batch_req_1", "mine", AttemptResponse(200, BODY))
    assert (outcome.is_output, outcome.tally) == (True, Tally(1, 0, 7, 2, 3, 0))
    assert json.loads(outcome.text) == {
        "id": "batch_req_1",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "batch_req_1", "body": json.loads(BODY)},
        "error": None,
    }


def test_errors_are_told_apart_by_what_there_is() -> None:
    refused = outcome_of(0, "i", "c", AttemptResponse(400, b'{"error":{"message":"too long","code":"length"}}'))
    assert error_key(refused.text) == ("length", "too long")
    odd = outcome_of(0, "i", "c", AttemptResponse(500, b"boom"))
    assert error_key(odd.text) == ("http_500", "boom")
    body = json.loads(odd.text)["response"]["body"]
    assert body == {"error": {"message": "boom", "type": "server_error", "param": None, "code": None}}
    silent = outcome_of(0, "i", "c", AttemptResponse(None, reason="no whole answer within 3 s"))
    assert error_key(silent.text) == ("request_timeout", "no whole answer within 3 s")
    cut = outcome_of(0, "i", "c", AttemptResponse(200, b'{"half'))
    assert not cut.is_output
    assert error_key(unsent_outcome(0, "i", "c", "batch_expired").text)[0] == "batch_expired"


@given(OUTCOMES, st.data())
def test_of_a_journal_that_was_cut_anywhere_all_whole_lines_are_read(
    outcomes: list[Outcome], data: st.DataObject
) -> None:
    written = [journal_line(outcome) for outcome in outcomes]
    whole = b"".join(written)
    cut = data.draw(st.integers(0, len(whole)))
    kept, length = 0, 0
    while kept < len(written) and length + len(written[kept]) <= cut:
        length += len(written[kept])
        kept += 1
    assert list(journal_outcomes(io.BytesIO(whole[:cut]))) == outcomes[:kept]


@given(OUTCOMES.filter(bool), st.data())
def test_nothing_that_was_damaged_is_read(outcomes: list[Outcome], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(journal_line, outcomes)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    found = list(journal_outcomes(io.BytesIO(bytes(whole))))
    assert found == outcomes[: len(found)]
    assert len(found) < len(outcomes)
