"""A record is one line of bounded length, and no text in it can imitate another line."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from engine_agent.protocol.log_lines import MESSAGE_CHARS, TRACEBACK_CHARS, JsonLines, PlainLines

FORGED = "/a\nERROR audit: forged\r\x1b[2K\x1b[1A\x85\u2028\u2029\x00\x7f\x9b1A\ud800\u202egnp\u2066"
FORMS = [PlainLines("%(levelname)s %(name)s: %(message)s"), JsonLines("web")]


def record(message: str = "%s", *arguments: Any, error: BaseException | None = None, **more: Any) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("web", logging.INFO, __file__, 1, message, arguments, exc_info)
    made.__dict__.update(more)
    return made


def raised(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def is_one_line(text: str) -> bool:
    return text.isprintable() and len(text.splitlines()) == 1


@pytest.mark.parametrize("form", FORMS)
def test_control_characters_are_escaped_in_messages_names_and_tracebacks(form: logging.Formatter) -> None:
    line = form.format(record("%s", FORGED, error=raised(FORGED), cell=FORGED))
    assert is_one_line(line)
    assert r"/a\nERROR audit: forged\r\u001b[2K" in line
    assert "Traceback" in line


def test_what_json_said_is_read_back_whole() -> None:
    assert json.loads(FORMS[1].format(record("%s", FORGED)))["message"] == FORGED


@pytest.mark.parametrize("form", FORMS)
def test_a_line_is_bounded_whatever_was_sent(form: logging.Formatter) -> None:
    line = form.format(record("%s 404", "/" + "x" * 60_000, error=raised("y" * 600_000)))
    assert len(line) < MESSAGE_CHARS + TRACEBACK_CHARS + 1_000
    assert "56005 characters cut" in line
    assert "x 404" in line


@pytest.mark.parametrize("form", FORMS)
def test_an_error_that_was_answered_leaves_no_traceback(form: logging.Formatter) -> None:
    refused = raised("Invalid HTTP_HOST header")
    assert "Traceback" not in form.format(record("%s", refused, error=refused, status_code=400))
    assert "Traceback" in form.format(record("%s", refused, error=refused, status_code=500))
    assert "Traceback" in form.format(record("%s", refused, error=refused))


@pytest.mark.parametrize("form", ["line", "json"])
def test_agents_write_such_lines(form: str) -> None:
    program = (
        "import logging, os; from engine_agent.protocol.log_lines import configure_logging; "
        f"configure_logging(os.environ, 'agent'); logging.info('a%s', {FORGED[:-9]!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"SWITCHYARD_LOG_FORMAT": form}, capture_output=True, check=True
    )
    assert is_one_line(done.stderr.decode().removesuffix("\n"))
