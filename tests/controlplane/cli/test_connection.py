"""Retries: always for reads, for writes only with an idempotency key, and a limited number of times."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from controlplane.cli.connection import TRIES, Connection, pause_s
from controlplane.cli.errors import Failure, Problem
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.server_target import Target

Answer = Callable[[httpx.Request], httpx.Response]


class Server:
    """Returns the given responses in order, and records requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []
        self.notes: list[str] = []
        self.connection = Connection(
            Target("http://server", "sw_token", ""),
            sleep=self.slept.append,
            say=self.notes.append,
            transport=httpx.MockTransport(self._answer),
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def ok(found: Any) -> httpx.Response:
    return httpx.Response(200, json=found)


def test_a_read_is_tried_again_until_it_answers() -> None:
    server = Server(httpx.ConnectError("refused"), httpx.Response(503), httpx.ReadError("reset"), ok({"a": 1}))
    assert server.connection.get("cells/x") == {"a": 1}
    assert len(server.slept) == 3
    assert server.notes[0] == "http://server: no connection; trying again (2 of 5)"
    assert server.requests[0].url.path == "/api/v1/cells/x"
    assert server.requests[0].headers["Authorization"] == "Bearer sw_token"


def test_it_gives_up_after_a_few_tries() -> None:
    server = Server(httpx.ConnectError("refused"))
    with pytest.raises(Failure, match="cannot reach http://server: refused") as refused:
        server.connection.get("cells")
    assert refused.value.code is ExitCode.UNREACHABLE
    assert len(server.requests) == TRIES


def test_an_order_is_repeated_with_the_key_that_makes_it_harmless() -> None:
    server = Server(httpx.ReadError("reset"), ok({}))
    server.connection.post("cells/x/drain", {"why": ""})
    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first == second
    server.connection.post("cells/x/drain")
    assert server.requests[2].headers["Idempotency-Key"] != first


def test_it_waits_while_what_was_sent_before_is_worked_on() -> None:
    busy = httpx.Response(409, json={"detail": "being worked on"}, headers={"Retry-After": "1"})
    server = Server(httpx.ReadError("reset"), busy, ok({"a": 1}))
    assert server.connection.post("rollouts") == {"a": 1}
    assert server.slept[1] == 1.0


def test_a_change_without_a_key_is_not_sent_twice() -> None:
    server = Server(httpx.ReadError("reset"))
    with pytest.raises(Failure, match="the request may have been carried out"):
        server.connection.patch("deployments/x", {})
    assert len(server.requests) == 1


def test_what_was_never_sent_may_be_sent_again() -> None:
    server = Server(httpx.ConnectError("refused"), ok({}))
    assert server.connection.patch("deployments/x", {}) == {}


def test_what_takes_too_long_is_not_asked_again() -> None:
    server = Server(httpx.ReadTimeout("slow"))
    with pytest.raises(Failure) as late:
        server.connection.get("cells")
    assert late.value.code is ExitCode.TIMED_OUT
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, ExitCode.NOT_ACCEPTED),
        (401, ExitCode.NOT_ALLOWED),
        (403, ExitCode.NOT_ALLOWED),
        (404, ExitCode.NOT_FOUND),
        (409, ExitCode.CONFLICT),
        (412, ExitCode.CONFLICT),
        (418, ExitCode.NOT_ACCEPTED),
        (500, ExitCode.SERVER_FAULT),
    ],
)
def test_each_refusal_has_its_exit_code(status: int, code: ExitCode) -> None:
    document = {"status": status, "title": "T", "detail": "what was wrong"}
    with pytest.raises(Problem, match="what was wrong") as refused:
        Server(httpx.Response(status, json=document)).connection.get("cells")
    assert refused.value.code is code


def test_an_answer_that_is_no_json_says_so() -> None:
    with pytest.raises(Failure, match="without JSON; is this a Switchyard"):
        Server(httpx.Response(200, text="<html>hello")).connection.get("cells")


def test_pages_are_followed_up_to_the_limit() -> None:
    page = {"next": "http://elsewhere/api/v1/cells?cursor=2", "results": [{"id": 1}, {"id": 2}]}
    last = {"next": None, "results": [{"id": 3}, {"id": 4}]}
    server = Server(ok(page), ok(last))
    assert [row["id"] for row in server.connection.pages("cells", {"state": ("ready", "lost")}, most=3)] == [1, 2, 3]
    assert str(server.requests[0].url) == "http://server/api/v1/cells?state=ready&state=lost&page_size=3"
    assert str(server.requests[1].url) == "http://server/api/v1/cells?cursor=2"


def test_pauses_double_and_follow_the_server() -> None:
    assert [pause_s(attempt, None, 0.0) for attempt in range(6)] == [0.3, 0.6, 1.2, 2.4, 4.8, 5.0]
    assert pause_s(0, "2", 0.5) == 2.0
    assert pause_s(0, "3600", 0.5) == 5.0


def test_problems_are_lines_with_field_rule_and_place() -> None:
    errors = [{"field": "documents.0.spec.cells", "rule": "unknown", "message": "unknown field"}]
    problem = Problem(400, json.loads(json.dumps({"errors": errors})), {"documents.0.spec": "fleet.yaml:4"})
    assert problem.lines == ("fleet.yaml:4: documents.0.spec.cells: unknown field [unknown]",)
