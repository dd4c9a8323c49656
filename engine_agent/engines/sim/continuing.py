"""Streams that can continue at another cell (`engine_agent.protocol.continuation`): marks before events, and requests
that repeat a stream whose first tokens were generated elsewhere. A replay must be the beginning of the answer that this
engine would give."""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from engine_agent.engines.openai_http import Scope, Usage
from engine_agent.engines.sim.api.common import AnswerWriter
from engine_agent.engines.sim.planning.answer_plan import Answer
from engine_agent.engines.sim.planning.generation_request import GenerationRequest
from engine_agent.engines.sim.planning.vocabulary import token_id
from engine_agent.protocol.continuation import (
    CONTINUATION_HEADER,
    REFUSED_TYPE,
    continuation_of,
    prompt_mark,
    prompt_name,
    tokens_mark,
)
from engine_agent.protocol.request_bodies import BadRequest


class ContinuationRefused(ValueError):
    """A stream that this engine cannot continue, with the reason."""

    def body(self) -> bytes:
        return msgspec.json.encode({"error": {"type": REFUSED_TYPE, "message": str(self)}})


@dataclass(frozen=True)
class Marking:
    """The marks of one stream: the name of its prompt, the ids of its tokens, and the groups that it repeats."""

    prompt: str
    ids: Sequence[int]
    groups: tuple[tuple[int, ...], ...] = ()
    cached_tokens: int | None = None
    """Of the prompt, in the first run of a stream that this engine repeats; None if this is the first one."""

    @property
    def replayed(self) -> int:
        return sum(map(len, self.groups))


def answer_key(scope: Scope) -> str:
    """Returns the unique part of the ids of an answer. With marks it follows from the request's id, so that a stream
    keeps its ids at another cell."""
    headers = dict(scope["headers"])
    if CONTINUATION_HEADER in headers and (request_id := headers.get(b"x-request-id")):
        return hashlib.sha256(request_id).hexdigest()[:32]
    return uuid.uuid4().hex


def marking_of(scope: Scope, body: bytes, request: GenerationRequest, answers: Sequence[Answer]) -> Marking | None:
    """Returns the marks of a stream, None if none were requested or it has several answers. Raises ContinuationRefused
    if it repeats another stream's tokens. Raises BadRequest for a repeat that is malformed or did not request marks."""
    try:
        continuation = continuation_of(body)
    except ValueError as error:
        raise BadRequest(f"malformed continuation: {error}") from None
    if CONTINUATION_HEADER not in dict(scope["headers"]):
        if continuation is not None:
            raise BadRequest("only the fleet may continue a stream", code="unsupported_parameter")
        return None
    if not request.stream or len(answers) != 1:
        if continuation is not None:
            raise ContinuationRefused("only a stream with one answer can continue")
        return None
    prompt = prompt_name(request.prompt.ids or [token_id(text) for text in request.prompt.token_texts()])
    marking = Marking(prompt, [token_id(token.text) for token in answers[0].tokens])
    if continuation is None:
        return marking
    if continuation.prompt_name != prompt:
        raise ContinuationRefused(f"the prompt is {prompt} here, and was {continuation.prompt:.80}")
    given = [one for group in continuation.groups for one in group]
    if given != list(marking.ids[: len(given)]):
        raise ContinuationRefused("the tokens are not the beginning of this engine's answer")
    return Marking(prompt, marking.ids, continuation.groups, continuation.cached_tokens)


class MarkedWriter:
    """Writes a stream with marks, and the events of replayed tokens before the first new one. See `AnswerWriter`."""

    def __init__(self, writer: AnswerWriter, marking: Marking) -> None:
        self._writer = writer
        self._marking = marking

    def opening(self, usage: Usage) -> bytes:
        usage = self._of_stream(usage)
        mark = prompt_mark(self._marking.prompt, usage.cached_tokens)
        pieces, places = [mark, self._writer.opening(usage)], count()
        for group in self._marking.groups:
            pieces.append(tokens_mark(group))
            pieces += [self._writer.token_event(0, next(places)) for _ in group]
        return b"".join(pieces)

    def token_event(self, answer: int, index: int) -> bytes:
        """`index` counts the new tokens. -1: all tokens are repeated."""
        if index < 0:
            return b""
        at = self._marking.replayed + index
        return tokens_mark(self._marking.ids[at : at + 1]) + self._writer.token_event(answer, at)

    def closing(self, usage: Usage) -> bytes:
        return self._writer.closing(self._of_stream(usage))

    def whole(self, usage: Usage) -> bytes:
        return self._writer.whole(usage)

    def _of_stream(self, usage: Usage) -> Usage:
        """The client gets the cached tokens of the first run: here, repeated tokens may be cached as well."""
        cached = self._marking.cached_tokens
        return usage if cached is None else replace(usage, cached_tokens=cached)

    def error_event(self, status: int, message: str) -> bytes:
        return self._writer.error_event(status, message)
