"""Ends a kept response with the near-real-time request that makes it, in the transaction of that: so each has exactly
one outcome, whoever ends it."""

import json
from datetime import datetime

from traffic.models import AsyncRequest, StoredResponse
from traffic.models.stored_response import OPEN_STATES
from traffic.planning.async_request import AsyncState
from traffic.planning.stored_response import ResponseState, ended_response, state_of

RESPONSES_PATH = "/v1/responses"


def response_end(request: AsyncRequest, now: datetime) -> None:
    """Note how the request ended, and take over what came of it: it is kept once."""
    stored = StoredResponse.objects.select_for_update().filter(request=request, state__in=OPEN_STATES).first()
    answer = _answer_of(request)
    request.answer = None
    if stored is None:
        return
    state = _state(AsyncState(request.state), answer)
    shown = ended_response(json.loads(bytes(stored.response)), state, request.reason, answer)
    stored.response = json.dumps(shown, separators=(",", ":")).encode()
    stored.bytes = len(stored.input) + len(stored.response)
    stored.state, stored.ended_at = state.value, now
    stored.save(update_fields=["response", "bytes", "state", "ended_at"])


def _state(ended: AsyncState, answer: object) -> ResponseState:
    match ended:
        case AsyncState.DONE:
            return state_of(answer)
        case AsyncState.CANCELLED:
            return ResponseState.CANCELLED
    return ResponseState.FAILED


def _answer_of(request: AsyncRequest) -> object:
    if request.answer is None:
        return None
    try:
        return json.loads(bytes(request.answer))
    except ValueError:
        return None
