"""The buffer of latest reports: nothing newer is ever overwritten, and nothing is lost between two writes."""

from dataclasses import dataclass, replace

import pytest

from fleet.consumers.report_buffer import ReportBuffer


@dataclass(frozen=True)
class Received:
    connection: str
    text: str


def ended(report: Received) -> Received:
    return replace(report, text="gone")


@pytest.fixture
def reports() -> ReportBuffer[Received]:
    return ReportBuffer()


def test_the_latest_report_is_taken_once(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1"))
    reports.put("a", Received("k", "2"))
    assert reports.take() == {"a": Received("k", "2")}
    assert reports.take() == {}


def test_putting_a_report_returns_the_previous_one(reports: ReportBuffer[Received]) -> None:
    assert reports.put("a", Received("k", "1")) is None
    reports.take()
    assert reports.put("a", Received("k", "2")) == Received("k", "1")


def test_what_could_not_be_written_comes_again_unless_there_is_newer(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1")), reports.put("b", Received("k", "1"))

    def broken(_: list[Received]) -> None:
        reports.put("a", Received("k", "2"))
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - it has no text
        reports.flush(broken)
    assert reports.take() == {"a": Received("k", "2"), "b": Received("k", "1")}


def test_what_was_written_does_not_come_again(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1"))
    written: list[Received] = []

    reports.flush(written.extend)
    reports.flush(written.extend)
    assert written == [Received("k", "1")]


def test_a_connection_that_ends_has_a_final_report(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1"))
    reports.end("a", "k", ended)
    reports.end("a", "k", ended)
    assert reports.take() == {"a": Received("k", "gone")}
    assert reports.put("a", Received("k2", "1")) is None


def test_the_end_of_an_older_connection_changes_nothing_of_the_newer(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("new", "1"))
    reports.end("a", "old", ended)
    assert reports.take() == {"a": Received("new", "1")}


def test_a_connection_that_never_reported_has_no_final_report(reports: ReportBuffer[Received]) -> None:
    reports.end("a", "k", ended)
    assert reports.take() == {}
