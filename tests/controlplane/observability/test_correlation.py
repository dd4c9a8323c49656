"""One number leads from a request to its answer, its log lines, its audit record and the tasks that it sent."""

import json
import logging

import pytest
from celery import Celery, signals

from audit.models import AuditRecord
from controlplane.observability.log_format import json_lines
from engine_agent.protocol.log_lines import LogFormat, log_format
from kernel.tracing import MESSAGE_HEADER, bind_request_id, request_id
from tests.controlplane.api.client import bearer
from tests.fleet import rows


@pytest.mark.django_db
def test_a_given_number_is_answered_and_recorded() -> None:
    node = rows.node("n-00000001")
    answer = bearer().post(f"/api/v1/nodes/{node.id}/cordon", headers={"X-Request-Id": "deploy-42"})
    assert answer["X-Request-Id"] == "deploy-42"
    assert AuditRecord.objects.get().request_id == "deploy-42"


@pytest.mark.django_db
@pytest.mark.parametrize("given", ["", "two words", 65 * "a", "line\nfeed"])
def test_a_number_that_is_none_is_replaced(given: str) -> None:
    answer = bearer().get("/api/v1/nodes", headers={"X-Request-Id": given})
    assert len(answer["X-Request-Id"]) == 32


def test_log_lines_are_json_with_the_number() -> None:
    record = logging.LogRecord("fleet", logging.WARNING, __file__, 1, "cell %s is down", ("c-1",), None)
    with bind_request_id("r-7"):
        line = json.loads(json_lines().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("warning", "fleet", "cell c-1 is down")
    assert line["request_id"] == "r-7"


def test_an_unknown_form_of_lines_is_refused_with_those_there_are() -> None:
    assert log_format({}) is LogFormat.LINE
    with pytest.raises(ValueError, match="line, json"):
        log_format({"SWITCHYARD_LOG_FORMAT": "xml"})


def test_a_task_runs_under_the_number_of_its_request() -> None:
    app = Celery("test", set_as_current=False)
    app.conf.task_always_eager = True
    seen: list[str] = []

    @app.task(name="test.look")
    def look() -> None:
        seen.append(request_id())

    headers: dict[str, str] = {}
    with bind_request_id("r-8"):
        signals.before_task_publish.send(sender="test.look", headers=headers)
    assert headers[MESSAGE_HEADER] == "r-8"
    look.apply(headers=headers)
    look.apply()
    assert seen[0] == "r-8"
    assert seen[1] not in {"", "r-8"}
    assert request_id() == ""
