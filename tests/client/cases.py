"""The behaviour that the Python and the Java client share: regions' answers, calls, and the expected results.

`calls`: `do` with its arguments (`tests/client/test_cases.py` and `Cases.java` run them). `results`: one for each call;
only the named members are compared. `hosts`: regions of the requests in order. `headers`: some of the first request's.
"""

from typing import Any

ACCEPTED = {"id": "ar_1", "status": "queued", "callback_secret": "shh"}
QUICK = {"attempts": 4, "longest_wait_s": 1.0, "rest_s": 60.0}
PATIENT = {**QUICK, "longest_wait_s": 30.0}
LIMITS = {
    "x-ratelimit-limit-tokens": "6000", "x-ratelimit-remaining-tokens": "5990", "x-ratelimit-reset-tokens": "1m0.5s",
    "x-switchyard-region": "us-east-1",
}  # fmt: skip


def said(text: str, **headers: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    return {"json": {"choices": [choice], "usage": usage}, "headers": headers}


def refused(status: int, code: str, **headers: str) -> dict[str, Any]:
    error = {"message": f"{code} it is", "type": "server_error", "param": None, "code": code}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"status": status, "json": {"error": error}, "headers": named}


def delta(text: str) -> str:
    return 'data: {"choices":[{"index":0,"delta":{"content":"' + text + '"}}]}\n\n'


def message(kind: str) -> str:
    return f'event: {kind}\ndata: {{"type":"{kind}"}}\n\n'


def block(text: str) -> str:
    """A piece of text in the dialect of Messages."""
    return f'data: {{"type":"content_block_delta","delta":{{"type":"text_delta","text":"{text}"}}}}\n\n'


DONE = "data: [DONE]\n\n"
CUT, NEVER = {"cut": True}, {"never": True}
POST, STREAM = {"do": "post"}, {"do": "stream"}
RESUMED_POST, RESUMED = {**POST, "resumes": True}, {**STREAM, "resumes": True}


def case(
    calls: list[dict[str, Any]], results: list[dict[str, Any]], *, hosts: list[str] | None = None, **more: Any
) -> dict[str, Any]:
    """Regions are the keyword arguments with lists, in the order in which the client has them."""
    regions = {name: more.pop(name) for name in list(more) if name in {"east", "west", "away", "secure"}}
    options = {"retries": QUICK, **more.pop("options", {})}
    return {"calls": calls, "results": results, "hosts": hosts, "regions": regions, "options": options, **more}


NO_CELL = refused(503, "no_ready_cell", retry_after="1")
LIMITED = refused(429, "rate_limit_exceeded", retry_after_ms="1")
FINISHED = {**ACCEPTED, "status": "done", "response": {"status_code": 200, "body": said("done")["json"]}}

CASES: dict[str, dict[str, Any]] = {
    "an_answer": case(
        [POST],
        [{"text": "hello", "attempts": 1, "usage": [7, 3, 4], "region": "us-east-1", "tokens": [6000, 5990, 60.5]}],
        east=[said("hello", **LIMITS)],
        options={"api_key": "sw_1", "serving_class": "batch", "trace": "00-1"},
        headers={"authorization": "Bearer sw_1", "x-switchyard-class": "batch", "traceparent": "00-1"},
        body={"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    ),
    "headers_of_a_call": case(
        [{"do": "post", "headers": {"X-Switchyard-Class": "realtime", "X-Request-Id": "mine"}}], [{"text": "hello"}],
        east=[said("hello")], options={"serving_class": "batch"},
        headers={"x-switchyard-class": "realtime", "x-request-id": "mine"},
    ),
    "paths": case(
        [{"do": "post", "path": path, "body": {}} for path in ("/v2/rerank", "rerank", "/responses", "/v1/score")]
        + [{"do": "get", "path": path} for path in ("/version", "/health?model=m", "/usage")],
        [{"text": "hello"}] * 7, east=[said("hello")],
        paths=["/v2/rerank", "/rerank", "/v1/responses", "/v1/score", "/version", "/health?model=m", "/v1/usage"],
    ),
    "models_and_embeddings": case(
        [{"do": "models"}, {"do": "embeddings"}],
        [{"models": [{"id": "m"}]}, {"vectors": [[0.5, 1.0], [2.0, -1.5]]}],
        east=[
            {"json": {"data": [{"id": "m"}]}},
            {"json": {"data": [{"index": 1, "embedding": [2, -1.5]}, {"index": 0, "embedding": [0.5, 1.0]}]}},
        ],
        paths=["/v1/models", "/v1/embeddings"],
        last_body={"model": "m", "input": ["one", "two"], "dimensions": 2},
    ),
    "the_next_region_answers_for_one_that_is_away": case(
        [POST, POST], [{"text": "west", "attempts": 2}, {"text": "west", "attempts": 1}],
        away=[], west=[said("west")], hosts=["west", "west"],
    ),
    "the_next_region_answers_for_one_that_closes": case(
        [POST], [{"text": "west", "attempts": 2}], east=[CUT], west=[said("west")], hosts=["east", "west"],
    ),
    "the_next_region_answers_for_one_without_a_cell": case(
        [POST, POST], [{"text": "west"}, {"attempts": 1}],
        east=[NO_CELL], west=[said("west")], hosts=["east", "west", "west"],
    ),
    "a_limit_is_waited_for_in_its_region": case(
        [POST], [{"text": "now", "attempts": 2}],
        east=[LIMITED, said("now")], west=[said("no")], hosts=["east", "east"],
    ),
    "a_limit_beyond_the_longest_wait_is_final": case(
        [POST], [{"error": "ApiError", "status": 429, "code": "rate_limit_exceeded"}],
        east=[refused(429, "rate_limit_exceeded", retry_after="2")], west=[said("no")], hosts=["east"],
    ),
    "a_wait_ends_with_the_deadline": case(
        [{"do": "post", "deadline_s": 1.5}], [{"error": "DeadlineExceeded"}], options={"retries": PATIENT},
        east=[refused(429, "rate_limit_exceeded", retry_after="20")], hosts=["east"],
    ),
    "a_refusal_without_a_time_is_final": case(
        [POST],
        [{"error": "ApiError", "status": 404, "code": "model_not_found", "request_id": "r-1",
          "said": "404 model_not_found: model_not_found it is"}],
        east=[refused(404, "model_not_found", x_request_id="r-1")], west=[said("no")], hosts=["east"],
    ),
    "a_wrong_key": case(
        [POST], [{"error": "ApiError", "status": 401, "code": "invalid_api_key"}],
        east=[refused(401, "invalid_api_key")], west=[said("no")], hosts=["east"],
    ),
    "a_hedge_that_fails_waits_for_the_first": case(
        [POST], [{"text": "late", "attempts": 2}], options={"hedge_after_s": 0.2}, hosts=["east", "west"],
        east=[{**said("late"), "after": "west"}], west=[refused(500, "ingress_error")],
    ),
    "an_error_that_is_no_json": case(
        [POST], [{"error": "ApiError", "status": 502, "said": "502 refused: <html>bad gateway"}],
        east=[{"status": 502, "text": "<html>bad gateway"}],
    ),
    "a_redirect_is_not_followed": case(
        [POST], [{"error": "ApiError", "status": 302}],
        east=[{"status": 302, "text": "", "headers": {"location": "http://127.0.0.1:1/"}}], hosts=["east"],
    ),
    "attempts_end": case([POST], [{"error": "NoAnswer"}], away=[], east=[CUT], hosts=["east", "east"]),
    "an_answer_that_breaks_off_is_not_sent_again": case(
        [POST], [{"error": "BrokenOff"}], east=[{"short": '{"choices":'}], west=[said("no")], hosts=["east"],
    ),
    "an_answer_that_breaks_off_is_sent_again_if_asked": case(
        [RESUMED_POST], [{"text": "whole", "attempts": 2}],
        east=[{"short": '{"choices":'}], west=[said("whole")], hosts=["east", "west"],
    ),
    "a_stream_continues_at_the_next_region_if_asked": case(
        [RESUMED], [{"texts": ["one ", "two ", "th", "ree"]}], hosts=["east", "west"],
        east=[{"stream": [delta("one "), delta("two ")], "then": "cut"}],
        west=[{"stream": [delta("one two th"), delta("ree"), DONE]}],
    ),
    "a_stream_without_its_last_event_continues": case(
        [RESUMED], [{"texts": ["one ", "two"]}], hosts=["east", "west"],
        east=[{"stream": [delta("one ")]}], west=[{"stream": [delta("one "), delta("two"), DONE]}],
    ),
    "a_silent_stream_continues": case(
        [RESUMED], [{"texts": ["one ", "two"]}], options={"silence_s": 2.0}, closed=["east"],
        east=[{"stream": [delta("one ")], "then": "hang"}], west=[{"stream": [delta("one two"), DONE]}],
    ),
    "a_stream_of_messages_continues": case(
        [RESUMED], [{"texts": ["", "ab", "cd", "e", ""]}],
        east=[{"stream": [message("message_start"), block("ab")], "then": "cut"}],
        west=[{"stream": [message("message_start"), block("abcd"), block("e"), message("message_stop")]}],
    ),
    "a_stream_continues_twice_within_the_attempts": case(
        [RESUMED, RESUMED], [{"texts": ["one ", "two"]}, {"texts": ["one ", "two"], "error": "BrokenOff"}],
        options={"retries": {**QUICK, "attempts": 3}},
        east=[
            {"stream": [delta("one "), delta("two")], "then": "cut"}, {"stream": [delta("one two"), DONE]},
            {"stream": [delta("one "), delta("two")], "then": "cut"},
        ],
        west=[{"stream": [delta("one ")], "then": "cut"}],
    ),
    "a_repeat_that_is_another_answer_breaks_off": case(
        [RESUMED], [{"texts": ["one ", "two"], "error": "BrokenOff"}], hosts=["east", "west"],
        east=[{"stream": [delta("one "), delta("two")], "then": "cut"}], west=[{"stream": [delta("one 2"), DONE]}],
    ),
    "a_stream_with_a_tool_call_is_not_sent_again": case(
        [RESUMED], [{"texts": [""], "error": "BrokenOff"}], hosts=["east"],
        east=[{"stream": ['data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n'], "then": "cut"}],
        west=[{"stream": [DONE]}],
    ),
    "a_refusal_of_the_repeat_is_reported": case(
        [RESUMED], [{"texts": ["one"], "error": "ApiError", "code": "model_not_found"}], hosts=["east", "west"],
        east=[{"stream": [delta("one")], "then": "cut"}], west=[refused(404, "model_not_found")],
    ),
    "a_stream_that_breaks_off_is_not_sent_again_unless_asked": case(
        [STREAM], [{"texts": ["one"], "error": "BrokenOff"}], hosts=["east"],
        east=[{"stream": [delta("one")], "then": "cut"}], west=[{"stream": [DONE]}],
    ),
    "an_answer_that_is_no_object": case([POST], [{"error": "BrokenOff"}], east=[{"text": "[1]"}], hosts=["east"]),
    "a_deadline_travels_and_ends_the_call": case(
        [{"do": "post", "deadline_s": 1.5}], [{"error": "DeadlineExceeded"}],
        east=[CUT], west=[NEVER], hosts=["east", "west"], closed=["west"], deadline_ms=[1, 1500],
    ),
    "silence_is_no_answer": case(
        [POST], [{"text": "west"}], east=[NEVER], west=[said("west")], options={"silence_s": 1.0}, closed=["east"],
    ),
    "a_hedge_wins_and_the_slow_attempt_is_closed": case(
        [POST], [{"text": "fast", "attempts": 2}], east=[NEVER], west=[said("fast")], options={"hedge_after_s": 0.2},
        hosts=["east", "west"], closed=["east"],
    ),
    "a_stream": case(
        [STREAM], [{"texts": ["one ", "two", ""]}], body_stream=True,
        east=[{"stream": [delta("one "), delta("two"), 'data: {"choices":[],"usage":{"prompt_tokens":2}}\n\n', DONE]}],
    ),
    "a_stream_in_pieces_with_comments_and_returns": case(
        [STREAM], [{"texts": ["é1", "two"]}],
        east=[{"stream": [
            ": hello\r", "\n\r\n", *delta("é1").replace("\n", "\r\n"), "event: x\rid: 4\rda", "ta:",
            delta("two")[6:].replace("\n", "\r"), DONE,
        ]}],
    ),
    "a_stream_that_is_cut": case(
        [STREAM], [{"texts": ["one"], "error": "BrokenOff"}],
        east=[{"stream": [delta("one")], "then": "cut"}], west=[said("no")], hosts=["east"],
    ),
    "a_stream_without_its_end": case(
        [STREAM], [{"texts": ["one"], "error": "BrokenOff"}], east=[{"stream": [delta("one")]}], hosts=["east"],
    ),
    "an_error_inside_of_a_stream": case(
        [STREAM], [{"texts": ["one"], "error": "ApiError", "status": 200, "code": "engine_died"}],
        east=[{"stream": [delta("one"), 'data: {"error":{"message":"it died","code":"engine_died"}}\n\n']}],
    ),
    "a_stream_that_is_refused": case(
        [STREAM], [{"texts": ["one"]}], east=[NO_CELL], west=[{"stream": [delta("one"), DONE]}], hosts=["east", "west"],
    ),
    "an_event_that_is_no_json": case(
        [STREAM], [{"texts": ["one"], "error": "BrokenOff"}],
        east=[{"stream": [delta("one"), "data: {\n\n"], "then": "hang"}], closed=["east"],
    ),
    "a_line_without_an_end": case(
        [STREAM], [{"texts": [], "error": "BrokenOff"}], east=[{"huge": 17 << 20}], closed=["east"],
    ),
    "responses_and_messages_end_by_their_own_events": case(
        [{"do": "stream", "path": "/responses", "body": {}}, {"do": "stream", "path": "/messages", "body": {}}],
        [{"texts": ["hi", ""]}, {"texts": ["ho", ""]}],
        east=[
            {"stream": ['data: {"type":"response.output_text.delta","delta":"hi"}\n\n',
                        'data: {"type":"response.completed","response":{}}\n\n']},
            {"stream": ['event: content_block_delta\ndata: {"delta":{"text":"ho"}}\n\n',
                        'event: message_stop\ndata: {"type":"message_stop"}\n\n']},
        ],
    ),
    "a_stream_that_is_left_early_is_closed": case(
        [{"do": "stream", "take": 1}], [{"texts": ["one"]}],
        east=[{"stream": [delta("one"), delta("two")], "then": "hang"}], closed=["east"],
    ),
    "a_deadline_ends_a_stream": case(
        [{"do": "stream", "deadline_s": 1.5}], [{"texts": ["one"], "error": "DeadlineExceeded"}],
        east=[{"stream": [delta("one")], "then": "hang"}], closed=["east"],
    ),
    "tls_by_its_authority": case([POST], [{"text": "safe"}], secure=[said("safe")], options={"ca_file": True}),
    "tls_by_an_unknown_authority": case(
        [POST], [{"error": "NoAnswer"}], secure=[said("no")], hosts=[], options={"retries": {**QUICK, "attempts": 1}},
    ),
    "work_that_can_wait": case(
        [
            {"do": "submit", "body": {"model": "m"}}, {"do": "retrieve", "id": "ar_1"},
            {"do": "wait", "id": "ar_1", "timeout_s": 30}, {"do": "cancel", "id": "a/../b c"},
        ],
        [
            {"id": "ar_1", "status": "queued", "secret": "shh", "text": None}, {"status": "queued"},
            {"status": "done", "text": "done"}, {"status": "done"},
        ],
        east=[CUT], west=[{"status": 202, "json": ACCEPTED}, {"json": ACCEPTED}, {"json": FINISHED}],
        hosts=["east", "west", "west", "west", "west"], same_key=True,
        paths=["/v1/async/chat/completions"] * 2 + ["/v1/async/ar_1"] * 2 + ["/v1/async/a%2F..%2Fb%20c"],
        headers={
            "x-switchyard-deadline-ms": "60000", "x-switchyard-callback-url": "https://app/done",
            "x-switchyard-sink": "s3",
        },
    ),
    "work_that_does_not_end_in_time": case(
        [{"do": "wait", "id": "ar_1", "timeout_s": 0.01}], [{"error": "DeadlineExceeded"}], east=[{"json": ACCEPTED}],
    ),
    "a_state_without_an_id": case([{"do": "retrieve", "id": "ar_1"}], [{"error": "BrokenOff"}], east=[{"json": {}}]),
}  # fmt: skip
